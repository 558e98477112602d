/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/family.h"

const mm_family *const mm_families[MM_FAMILIES] = {
    &mm_deepseek_v4, &mm_modelopt, &mm_compressed_tensors, &mm_gpt_oss, &mm_mimo, &mm_fp8, &mm_bf16,
    &mm_gguf,        &mm_refused,  &mm_gguf_refused};
