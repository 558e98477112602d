# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of Python: the bits of one rank. Uses torch's process group if it is there.

test_ranks.py RANK SIZE FOLDER HOW cpu|cuda is one rank: brought together by "files", by a "port", by files
that also carry "file messages", by torch's process "group", or by one that carries "messages".
"""
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import time
import unittest
from pathlib import Path

import megamoe
import numpy as np
from common import Case, devices

TOKENS = (5, 0, 8)


def layer_and_batch(case):
    """The same for every rank: the seed is."""
    weights = case.weights("nvfp4", experts=9)
    return weights, case.batch(weights, sum(TOKENS))


def by_files(rank, size, folder):
    """An allgather of files that appear whole."""
    calls = iter(range(99))

    def allgather(mine):
        call = next(calls)
        part = Path(folder, f"{call}.{rank}.part")
        part.write_bytes(mine)
        part.rename(Path(folder, f"{call}.{rank}"))
        paths = [Path(folder, f"{call}.{other}") for other in range(size)]
        for path in paths:
            while not path.exists():
                time.sleep(.01)
        return [path.read_bytes() for path in paths]

    return allgather


def by_messages(rank, size, folder):
    """An alltoallv of the same files: each rank brings what it sends to all, one after the other."""
    everything = by_files(rank, size, folder)

    def alltoallv(send, receive):
        for sender, all_parts in enumerate(everything(pickle.dumps(list(map(bytes, send))))):
            if sender != rank:
                receive[sender][:] = pickle.loads(all_parts)[rank]

    return alltoallv


def comm_of(rank, size, folder, how):
    if how == "files":
        return megamoe.Comm.from_allgather(rank, size, by_files(rank, size, folder))
    if how == "file messages":
        exchanged = os.path.join(folder, "exchanged")
        os.makedirs(exchanged, exist_ok=True)
        return megamoe.Comm.from_transport(rank, size, by_files(rank, size, folder),
                                           by_messages(rank, size, exchanged))
    if how == "port":
        return megamoe.Comm.from_tcp(rank, size, port=int(Path(folder, "port").read_text()),
                                     job="test")
    import torch
    from megamoe import torch as mt
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                         world_size=size)
    return mt.comm_from_group(messages=how == "messages")


def on_torch(comm, device, weights, mine):
    """This rank's rows as bits, by a MegaMoELayer."""
    import torch
    from megamoe import torch as mt
    layer = mt.MegaMoELayer(weights, device, comm=comm, max_tokens=max(TOKENS))
    x, ids, scale = (torch.from_numpy(part) for part in mine)
    batch = [part.to(device.name) for part in (x.view(torch.bfloat16), ids, scale)]
    for _ in range(2):
        y = layer(*batch)
    layer.check()
    if device.type == "cuda":  # no workspace may go while another rank is inside a forward
        torch.distributed.barrier()
    return y.cpu().view(torch.uint16).numpy()


def rank_main(rank, size, folder, how, kind):
    comm = comm_of(rank, size, folder, how)
    case = Case()
    case.setUp()
    weights, batch = layer_and_batch(case)
    start = sum(TOKENS[:rank])
    mine = [part[start:start + TOKENS[rank]] for part in batch]
    name = "cpu" if kind == "cpu" else f"cuda:{rank % megamoe.device_count()}"
    with comm, megamoe.Device(name, threads=1, pin_threads=False) as device:
        if how in ("group", "messages"):
            y = on_torch(comm, device, weights, mine)
        else:
            y = np.zeros((TOKENS[rank], weights.hidden), np.uint16)
            with megamoe.Layer(weights, device, comm=comm) as layer, \
                    layer.workspace(tokens=max(TOKENS)) as workspace:
                workspace.stage(*mine)
                workspace.forward(layer, y)
        np.save(os.path.join(folder, f"y{rank}.npy"), y)


class Ranks(Case):
    def run_ranks(self, how, kind="cpu"):
        size = len(TOKENS)
        processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(size),
                                       self.folder.name, how, kind]) for rank in range(size)]
        self.assertEqual([process.wait(200) for process in processes], [0] * size)
        weights, batch = layer_and_batch(self)
        alone = weights.reference(*batch, device=kind)
        together = [np.load(self.path(f"y{rank}.npy")) for rank in range(size)]
        self.assertSameBits(np.concatenate(together), alone)

    def test_allgather(self):
        self.run_ranks("files")

    def test_port(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            Path(self.path("port")).write_text(str(free.getsockname()[1]))
        self.run_ranks("port")

    def test_transport(self):
        self.run_ranks("file messages")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no torch")
    def test_process_group(self):
        self.run_ranks("group")

    @unittest.skipUnless(importlib.util.find_spec("torch") and "cuda:0" in devices(),
                         "no torch, or no GPU that the library runs on")
    def test_process_group_on_gpus(self):
        """Each rank on the GPU of its number, or sharing it, if there are fewer."""
        self.run_ranks("group", "cuda")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no torch")
    def test_process_group_messages(self):
        self.run_ranks("messages")

    def test_failures(self):
        with self.assertRaisesRegex(KeyError, "mine"):
            megamoe.Comm.from_allgather(0, 2, lambda mine: {}["mine"])
        with self.assertRaisesRegex(ValueError, "expected 2 times"):
            megamoe.Comm.from_allgather(0, 2, lambda mine: [mine])
        with self.assertRaisesRegex(ZeroDivisionError, "by zero"):
            megamoe.Comm.from_transport(0, 2, lambda mine: 1 / 0, lambda send, receive: None)
        with self.assertRaises(TimeoutError):
            megamoe.Comm.from_tcp(1, 2, port=1, deadline_ms=200)
        for name in [name for name in os.environ if name.startswith(("RANK", "SLURM", "OMPI",
                                                                     "PMI"))]:
            del os.environ[name]
        with self.assertRaises(LookupError):
            megamoe.Comm.from_env()


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1].isdigit():
        rank_main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
    else:
        unittest.main()
