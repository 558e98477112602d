# SPDX-License-Identifier: Apache-2.0
"""Runs the megamoe tool and reads and writes safetensors files, with the standard library alone."""
import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest

TOOL = os.environ["MEGAMOE_TOOL"]
MODELS = ["deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash", "deepseek-v3",
          "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b"]
SCALE = "0.02"


class Case(unittest.TestCase):
    """A directory of its own, removed at the end."""

    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="megamoe-cli-")
        self.addCleanup(shutil.rmtree, self.directory)

    def path(self, name):
        return os.path.join(self.directory, name)

    def run_tool(self, *arguments, env=None):
        return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True,
                              env={**os.environ, **(env or {})})

    def good(self, *arguments, env=None):
        """Standard output of a run that must succeed in silence."""
        done = self.run_tool(*arguments, env=env)
        self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)
        return done.stdout

    def good_json(self, *arguments, env=None):
        return json.loads(self.good(*arguments, "--json", env=env))

    def fails(self, code, parts, *arguments, env=None):
        """The run ends with `code`; its one message names all `parts`."""
        done = self.run_tool(*arguments, env=env)
        self.assertEqual(done.returncode, code, (arguments, done.stderr))
        self.assertTrue(done.stderr.startswith("megamoe: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for part in parts:
            self.assertIn(str(part), done.stderr)
        return done

    def synth(self, model="qwen3-30b-a3b", *options, name="checkpoint"):
        out = self.path(name)
        self.good("synth", "--model", model, "--scale", SCALE, "--out", out, *options)
        return out


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as file:
        data = file.read()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length:]
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])])
            for name, t in header.items()}


def safetensors_bytes(tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def write_safetensors(path, tensors):
    with open(path, "wb") as file:
        file.write(safetensors_bytes(tensors))


def bf16(values):
    """Values that BF16 holds exactly."""
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def i32(values):
    return struct.pack(f"<{len(values)}i", *values)


def i64(values):
    return struct.pack(f"<{len(values)}q", *values)
