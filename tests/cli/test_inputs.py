# SPDX-License-Identifier: Apache-2.0
"""Paths that are not what a command expects, limits of files, and commands that are killed."""
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import time
import unittest

from tool import TOOL, Case, read_safetensors

INDEX = "model.safetensors.index.json"
PARTS = ["config.json", INDEX, "model.safetensors"]
LARGE = 5 << 30


def sparse(path, size, data=b"", at=0):
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(data)


class Inputs(Case):
    def commands(self, path):
        out = self.path("out")
        return [["inspect", path], ["prepare", path, "--out", out],
                ["prepare", path, "--quantize", "nvfp4", "--out", out],
                ["convert", path, out, "--to", "modelopt-nvfp4"],
                ["run", path, "--tokens", 1], ["verify", path], ["bench", path]]

    def all_fail(self, path, *parts):
        """None hangs, crashes or leaves an output; each names the path."""
        for command in self.commands(path):
            with self.subTest(command[0]):
                self.fails(2, [path, *parts], *command)
                self.assertFalse(os.path.exists(self.path("out")))

    def test_no_file(self):
        for make, part in [(lambda p: None, "No such file"),
                           (lambda p: os.symlink(self.path("nowhere"), p), "No such file"),
                           (lambda p: os.symlink(p, p), "symbolic links"),
                           (os.mkfifo, "not a regular file"), (os.mkdir, "no .safetensors file")]:
            for name in ["thing", "thing.safetensors", "thing.gguf"]:
                with self.subTest((part, name)):
                    path = self.path(name)
                    make(path)
                    if part != "no .safetensors file":
                        self.all_fail(path, part)
                    else:
                        for command in self.commands(path):
                            if command[0] != "verify":
                                self.fails(2, [path, part], *command)
                    if os.path.isdir(path):
                        os.rmdir(path)
                    elif os.path.lexists(path):
                        os.unlink(path)
        self.all_fail("/dev/null", "not a regular file")
        self.all_fail(self.path("a" * 300), "too long")

    def test_no_content(self):
        for name in ["empty", "empty.safetensors", "empty.gguf"]:
            sparse(self.path(name), 0)
            self.all_fail(self.path(name))
            sparse(self.path(name), LARGE)
            self.all_fail(self.path(name))

    @unittest.skipIf(os.geteuid() == 0, "root may read everything")
    def test_unreadable(self):
        path = self.path("thing.safetensors")
        sparse(path, 10)
        os.chmod(path, 0)
        self.all_fail(path, "Permission denied")

    def test_parts_of_a_checkpoint(self):
        whole = self.synth("deepseek-v4-flash", name="whole")
        for part in PARTS:
            for kind, make in [("directory", os.mkdir), ("fifo", os.mkfifo),
                               ("empty", lambda p: sparse(p, 0)),
                               ("sparse", lambda p: sparse(p, LARGE)),
                               ("dangling", lambda p: os.symlink(self.path("nowhere"), p))]:
                with self.subTest((part, kind)):
                    copy = self.path("copy")
                    shutil.copytree(whole, copy)
                    if os.path.exists(os.path.join(copy, part)):
                        os.unlink(os.path.join(copy, part))
                    make(os.path.join(copy, part))
                    for command in self.commands(copy):
                        if command[0] != "verify":
                            self.fails(2, [os.path.join(copy, part)], *command)
                    shutil.rmtree(copy)

    def test_parts_of_gguf(self):
        """One file that says it is the first of two, and a second that is none."""
        first, second = (self.path(f"m-0000{i}-of-00002.gguf") for i in (1, 2))
        with open(first, "wb") as file:
            file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + b"".join(
                struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, value)
                for key, value in [(b"split.no", 0), (b"split.count", 2)]))
        for make, part in [(lambda p: None, "download"), (os.mkdir, "not a regular file"),
                           (os.mkfifo, "not a regular file"), (lambda p: sparse(p, 0), "header"),
                           (lambda p: sparse(p, LARGE), "GGUF")]:
            with self.subTest(part):
                make(second)
                for path in [first, self.directory]:
                    for command in self.commands(path):
                        if command[0] != "verify":
                            self.fails(2, [second, part], *command)
                if os.path.isdir(second):
                    os.rmdir(second)
                elif os.path.exists(second):
                    os.unlink(second)

    def test_shards_that_are_no_files(self):
        for kind, make in [("directory", os.mkdir), ("fifo", os.mkfifo)]:
            checkpoint = self.path(kind)
            os.mkdir(checkpoint)
            make(os.path.join(checkpoint, "a.safetensors"))
            with open(os.path.join(checkpoint, INDEX), "w", encoding="utf-8") as file:
                json.dump({"weight_map": {"x": "a.safetensors"}}, file)
            self.fails(2, ["a.safetensors", "not a regular file"], "inspect", checkpoint)

    def test_links_are_followed(self):
        """A cache of downloads is made of links, file by file."""
        whole = self.synth("qwen3-30b-a3b", name="whole")
        want = self.good_json("inspect", whole)["layers"]
        links = self.path("links")
        os.mkdir(links)
        for name in os.listdir(whole):
            os.symlink(os.path.join(whole, name), os.path.join(links, name))
        os.symlink(links, self.path("link"))
        self.assertEqual(self.good_json("inspect", self.path("link"))["layers"], want)
        out = self.path("l.mmoe")
        self.good("prepare", self.path("link"), "--out", out)
        os.symlink(out, self.path("m.mmoe"))
        self.good("verify", self.path("m.mmoe"))
        self.good("run", self.path("m.mmoe"), "--tokens", 3, "--verify")

    def test_beyond_4_gib(self):
        """The experts lie behind a tensor of 5 GiB, which is a hole that nobody reads."""
        whole = self.synth("deepseek-v4-flash", name="whole")
        want = self.good_json("inspect", whole)["layers"]
        file = os.path.join(whole, "model.safetensors")
        tensors = read_safetensors(file)
        header, at, body = {"hole": {"dtype": "U8", "shape": [LARGE], "data_offsets": [0, LARGE]}}, \
            LARGE, b""
        for name, (dtype, shape, data) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
            body += data
        text = json.dumps(header).encode()
        with open(file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.seek(8 + len(text) + LARGE)
            stream.write(body)
        self.assertEqual(self.good_json("inspect", whole)["layers"], want)
        self.good("run", whole, "--tokens", 3, "--verify")
        os.truncate(file, os.path.getsize(file) - 1)
        self.fails(2, [file, "end of the file"], "inspect", whole)

    def test_tensors_to_read(self):
        checkpoint = self.synth()
        for make, part in [(os.mkfifo, "not a regular file"), (os.mkdir, "not a regular file"),
                           (lambda p: sparse(p, 0), "0 bytes"), (lambda p: sparse(p, LARGE), "{")]:
            path = self.path("in.safetensors")
            make(path)
            self.fails(2, [path, part], "run", checkpoint, "--input", path)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def test_a_prepared_file_that_is_cut_while_it_runs(self):
        file = self.path("l.mmoe")
        self.good("prepare", self.synth(), "--out", file)
        with open(file, "rb") as stream:
            whole = stream.read()
        for wait in [0, 0.01, 0.02, 0.04, 0.08, 0.16]:
            with open(file, "wb") as stream:
                stream.write(whole)
            with subprocess.Popen([TOOL, "run", file, "--tokens", "8192"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  text=True) as tool:
                time.sleep(wait)
                os.truncate(file, 4096)
                error = tool.stderr.read()
            if tool.returncode != 0:
                self.assertEqual(tool.returncode, 2, error)
                self.assertIn(file, error)


class Outputs(Case):
    def test_no_file_can_be_written_there(self):
        checkpoint = self.synth()
        for make, part in [(os.mkdir, "not a regular file"), (os.mkfifo, "not a regular file")]:
            path = self.path("out")
            make(path)
            self.fails(2, [path, part], "prepare", checkpoint, "--out", path)
            self.fails(2, [path, part], "run", checkpoint, "--tokens", 1, "--output", path)
            if os.path.isdir(path):
                sparse(os.path.join(path, "mine"), 1)
            self.fails(2, [path, "exists and is not"], "convert", checkpoint, path, "--to",
                       "modelopt-nvfp4")
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def limited(self, size, *arguments):
        """A run whose files may have `size` bytes; its error and what it leaves behind."""
        before = sorted(os.listdir(self.directory))
        done = subprocess.run(
            [TOOL, *map(str, arguments)], capture_output=True, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(sorted(os.listdir(self.directory)), before)
        return done.stderr

    def test_no_room(self):
        checkpoint = self.synth()
        out = self.path("out")
        size = os.path.getsize(os.path.join(checkpoint, "model.safetensors"))
        self.assertIn(f"{out}: cannot write: File too large",
                      self.limited(size // 2, "prepare", checkpoint, "--out", out))
        self.assertIn(f"{out}: cannot write: File too large",
                      self.limited(4096, "run", checkpoint, "--tokens", 64, "--output", out))
        synth = ["synth", "--model", "qwen3-30b-a3b", "--scale", "0.02", "--out", out]
        for file, command in [("model.safetensors", synth),
                              ("model.gguf", synth + ["--container", "gguf"]),
                              ("model.safetensors",
                               ["convert", checkpoint, out, "--to", "modelopt-nvfp4"])]:
            for limit in [size // 2, 100]:
                error = self.limited(limit, *command)
                self.assertIn(file, error)
                self.assertIn("File too large", error)


class Killed(Case):
    def kill(self, name, *arguments):
        """Kills a command once it has begun to write `name`; what stands beside it then."""
        for _ in range(20):
            with subprocess.Popen([TOOL, *map(str, arguments)], stdout=subprocess.DEVNULL) as tool:
                begun = False
                while tool.poll() is None and not begun:
                    begun = any(n.startswith(name + ".tmp-") for n in os.listdir(self.directory))
                    time.sleep(0.0005)
                tool.kill()
                tool.wait()
            left = [n for n in os.listdir(self.directory) if n.startswith(name)]
            if tool.returncode == -signal.SIGKILL and left and name not in left:
                return left
            for n in left:
                path = self.path(n)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        return self.skipTest("the command was always done before it could be killed")

    def test_prepare(self):
        checkpoint = self.path("checkpoint")
        self.good("synth", "--model", "qwen3-30b-a3b", "--scale", "0.12", "--out", checkpoint)
        out = self.path("l.mmoe")
        prepare = ["prepare", checkpoint, "--threads", 1, "--out", out]
        left = self.kill("l.mmoe", *prepare)
        self.assertEqual(len(left), 1)
        self.assertRegex(left[0], r"^l\.mmoe\.tmp-\w{6}$")
        self.good(*prepare)
        self.good("verify", out)

    def test_synth(self):
        synth = ["synth", "--model", "qwen3-30b-a3b", "--scale", "0.12", "--threads", 1, "--out",
                 self.path("c")]
        left = self.kill("c", *synth)
        self.assertEqual(len(left), 1)
        self.assertRegex(left[0], r"^c\.tmp-\w{6}$")
        self.good(*synth)
        self.good("inspect", self.path("c"))

    def test_convert(self):
        checkpoint = self.path("checkpoint")
        self.good("synth", "--model", "deepseek-v4-flash", "--scale", "0.12", "--out", checkpoint)
        convert = ["convert", checkpoint, self.path("new"), "--to", "compressed-tensors"]
        left = self.kill("new", *convert)
        self.assertEqual(len(left), 1)
        self.assertRegex(left[0], r"^new\.tmp-\w{6}$")
        self.good(*convert)
        self.good("inspect", self.path("new"))


if __name__ == "__main__":
    unittest.main()
