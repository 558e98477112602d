# SPDX-License-Identifier: Apache-2.0
"""A transformers model with its experts in 4 bits.

    python3 02_transformers.py                              # a small Qwen3-MoE with random weights
    python3 02_transformers.py DIRECTORY [mxfp4 | nvfp4]    # your BF16 model, from a directory
"""
import sys

import megamoe.transformers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    format = sys.argv[2] if len(sys.argv) > 2 else "mxfp4"
    torch.manual_seed(1)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
        ids = AutoTokenizer.from_pretrained(sys.argv[1])("Once upon a time",
                                                         return_tensors="pt").input_ids
    else:
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
            vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, moe_intermediate_size=128, num_experts=16,
            num_experts_per_tok=4, pad_token_id=0, eos_token_id=1), dtype=torch.bfloat16)
        ids = torch.randint(2, 512, (1, 12))
    model, ids = model.eval().to(device), ids.to(device)
    with torch.no_grad():
        before = model(ids).logits.float()

    # The three lines, with the import above.
    count = megamoe.transformers.quantize_experts(model, format)
    model.set_experts_implementation("megamoe")

    with torch.no_grad():
        after = model(ids).logits.float()
    print(f"{count} layers of experts in {format} on {device}: {model.model.layers[-1].mlp.experts}")
    print(f"logits moved by {((after - before).norm() / before.norm()).item():.2%}")
    print(model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist())


if __name__ == "__main__":
    main()
