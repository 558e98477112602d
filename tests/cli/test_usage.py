# SPDX-License-Identifier: Apache-2.0
"""Help, versions, usage errors and what goes to which stream."""
import json
import os
import pty
import re
import subprocess
import unittest

from tool import TOOL, Case

COMMANDS = ["info", "synth", "inspect", "prepare", "convert", "run", "launch", "verify",
            "bench", "compare", "scenario", "tune", "trace", "plot"]
SOURCE = os.environ["MEGAMOE_SOURCE"]


def read(*path):
    with open(os.path.join(*path)) as file:
        return file.read()


class Help(Case):
    def test_overview_lists_every_command(self):
        text = self.good("--help")
        for command in COMMANDS:
            self.assertRegex(text, rf"\n  {command} ")
        self.assertIn("example:", text)

    def test_each_command_explains_itself(self):
        for command in COMMANDS:
            with self.subTest(command):
                text = self.good(command, "--help")
                self.assertIn(f"usage: megamoe {command}", text)
                self.assertRegex(text, rf"example:\n  megamoe {command} ")
                self.assertEqual("--json" in text, command != "launch")

    def test_help_wins_over_missing_arguments(self):
        self.good("run", "--help", "--ranks", "2")

    def test_man_page_of_each_command_names_its_options(self):
        for command in COMMANDS:
            page = subprocess.run(["awk", "-v", f"command={command}", "-f", "man/command.awk",
                                   "tools/commands.h", "man/megamoe.1.scd"], cwd=SOURCE,
                                  capture_output=True, text=True, check=True).stdout
            self.assertEqual(page.splitlines()[0], f"megamoe-{command}(1)")
            for option in re.findall(r"\n  (--[a-z0-9-]+)", self.good(command, "--help")):
                with self.subTest(command=command, option=option):
                    self.assertRegex(page, rf"(?m)^\*{option}\*|, \*{option}\*")

    def test_command_without_a_man_page(self):
        done = subprocess.run(["awk", "-v", "command=frobnicate", "-f", "man/command.awk",
                               "tools/commands.h", "man/megamoe.1.scd"], cwd=SOURCE,
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("frobnicate", done.stderr)

    def test_linking_page_shows_the_example(self):
        shown = read(SOURCE, "docs/linking.md").split("```c\n")[1].split("```")[0]
        self.assertEqual(shown, read(SOURCE, "examples/01_run_layer.c"))

    def test_version(self):
        self.assertRegex(self.good("--version"), r"^megamoe \d+\.\d+\.\d+\n$")


class UsageErrors(Case):
    def test_no_command(self):
        done = self.run_tool()
        self.assertEqual(done.returncode, 2)
        self.assertIn("usage:", done.stdout)

    def test_unknown_command(self):
        self.fails(2, ["frobnicate"], "frobnicate")

    def test_unknown_option(self):
        for command in COMMANDS:
            with self.subTest(command):
                self.fails(2, ["--frobnicate", command], command, "--frobnicate")

    def test_option_without_value(self):
        self.fails(2, ["--model", "value"], "synth", "--model")

    def test_flag_with_value(self):
        self.fails(2, ["--json"], "info", "--json=1")

    def test_numbers(self):
        for option, value in [("--ranks", "0"), ("--ranks", "many"), ("--ranks", "2x"),
                              ("--ranks", ""), ("--ranks", "65"), ("--tokens", "-1"),
                              ("--tokens", "99999999999999999999"), ("--layer", "-2"),
                              ("--seed", "1.5")]:
            with self.subTest(option=option, value=value):
                self.fails(2, [option, value], "run", "nowhere", option, value)

    def test_scale(self):
        for value in ["0", "-1", "nan", "inf", "9", "x"]:
            with self.subTest(value):
                self.fails(2, ["--scale", value], "synth", "--model", "deepseek-v3", "--out",
                           self.path("out"), "--scale", value)

    def test_choices(self):
        self.fails(2, ["--input-scale", "row", "token|block"], "run", "x", "--input-scale", "row")
        self.fails(2, ["--activations", "fp8", "e4m3|int8"], "run", "x", "--activations", "fp8")
        self.fails(2, ["--format", "fp4", "mxfp4|nvfp4"], "synth", "--format", "fp4")
        self.fails(2, ["--nvfp4", "exactly"], "prepare", "nowhere", "--nvfp4", "exactly")

    def test_positional_arguments(self):
        for command in ["inspect", "prepare", "run", "verify"]:
            with self.subTest(command):
                self.fails(2, [command, "missing"], command)
                self.fails(2, [command, "b"], command, "a", "b")
        self.fails(2, ["info", "extra"], "info", "extra")

    def test_geometries(self):
        self.fails(2, ["--geometry", "small", "flash", "gpt-oss"], "bench", "--geometry", "small")

    def test_options_of_one_kind_of_device(self):
        for option in [["--seconds", "1"], ["--mapped"], ["--tier", "avx2"]]:
            self.fails(2, [option[0], "CPU", "cuda:3"], "bench", "--device", "cuda:3", *option)
        for option in [["--capacity", "8"], ["--token-tile", "8"], ["--lag", "1"],
                       ["--l2", "warm"], ["--launch", "eager"]]:
            self.fails(2, [option[0], "GPU", "cpu"], "bench", *option)
        self.fails(2, ["--tokens", "curve"], "bench", "--tokens", "curve")

    def test_capacity_that_batches_exceed(self):
        self.fails(2, ["--capacity 8", "9"], "bench", "--device", "cuda", "--capacity", "8",
                   "--tokens", "8,9")

    def test_options_that_exclude_each_other(self):
        self.fails(2, ["--tokens", "--input"], "run", "x", "--tokens", "3", "--input", "y")
        self.fails(2, ["--model", "--geometry"], "bench", "--model", "x", "--geometry", "A")
        self.fails(2, ["--model", "PATH"], "bench", "x", "--model", "y")

    def test_token_lists(self):
        for tokens in ["", ",", "1,", "0", "1,x", "1;2", "-4", "65537", ",".join("1" * 49)]:
            with self.subTest(tokens):
                self.fails(2, ["--tokens"], "bench", "--tokens", tokens)


class Streams(Case):
    def test_info_json(self):
        info = self.good_json("info", "--threads", "1")
        self.assertEqual(info["device"], "cpu")
        self.assertEqual(info["threads"], 1)
        self.assertIn(info["tier"], ["scalar", "avx2", "avx512"])
        self.assertNotIn("read_gbs", info)
        self.assertTrue(("gpus" in info) != ("no_gpus" in info))

    def test_info_refuses_a_device(self):
        self.fails(2, ["'gpu'", "cuda:N"], "info", "--device", "gpu")

    def test_info_measures(self):
        info = self.good_json("info", "--measure")
        self.assertGreater(info["read_gbs"], 0)
        self.assertGreater(info["dot_gflops"], 0)
        self.assertGreater(info["int8_gops"], 0)

    def test_tier_can_be_capped(self):
        self.assertEqual(self.good_json("info", env={"MEGAMOE_CPU": "scalar"})["tier"], "scalar")
        self.fails(2, ["sse9"], "info", env={"MEGAMOE_CPU": "sse9"})

    def test_full_disk(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([TOOL, "synth", "--list"], stdout=full,
                                  stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output", done.stderr)

    def test_progress_only_on_a_terminal(self):
        checkpoint = self.synth()
        arguments = [TOOL, "inspect", checkpoint, "--json"]
        piped = subprocess.run(arguments, capture_output=True)
        self.assertEqual(piped.stderr, b"")
        try:
            ours, theirs = pty.openpty()
        except OSError as error:
            self.skipTest(f"no pseudo-terminal: {error}")
        shown = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        drawn = os.read(ours, 65536)
        os.close(ours)
        self.assertIn(b"layer 0", drawn)
        self.assertIn(b"%", drawn)
        self.assertEqual(json.loads(shown.stdout), json.loads(piped.stdout))


if __name__ == "__main__":
    unittest.main()
