# SPDX-License-Identifier: Apache-2.0
"""What bash and zsh offer is what the tool takes."""
import os
import pty
import re
import select
import shutil
import subprocess
import time
import unittest

from tool import MODELS, TOOL, Case

HERE = os.path.dirname(os.path.abspath(__file__))
COMPLETIONS = os.path.join(os.environ["MEGAMOE_SOURCE"], "completions")

# readline, as far as the function speaks to it: the words, and what it may add of its own.
BASH = """
compopt() { printf 'compopt %s\\n' "$*"; }
source "$COMPLETIONS/megamoe.bash"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_megamoe
printf '%s\\n' "${COMPREPLY[@]}"
"""


class Completion:
    """offers(words): the set of what may stand in place of the last word."""

    def options(self, command):
        """{--option: the name of its value, "" for a flag}"""
        found = dict(re.findall(r"\n  (--[a-z0-9-]+) (\S*)", self.good(command, "--help")))
        self.assertIn("--help", found)
        return found

    def commands(self):
        found = re.findall(r"\n  ([a-z]+) ", self.good("--help").split("example:")[0])
        self.assertIn("bench", found)
        return found

    def test_commands(self):
        commands = self.commands()
        self.assertLessEqual(set(commands), self.offers(""))
        self.assertEqual(self.offers("be"), {"bench"})
        self.assertEqual(self.offers("--"), {"--help", "--version"})

    def test_every_option_of_every_command(self):
        for command in self.commands():
            with self.subTest(command):
                self.assertEqual(self.offers(command, "--"), set(self.options(command)))

    def test_beginnings_of_options(self):
        self.assertEqual(self.offers("run", "--in"), {"--input", "--input-scale"})

    def test_options_after_others(self):
        self.assertEqual(self.offers("run", "x", "--ranks", "4", "--verify", "--acc"),
                         {"--accumulate"})

    def test_every_choice(self):
        choices = 0
        for command in self.commands():
            for option, value in self.options(command).items():
                words = {w for w in value.split("|") if w and not re.search("[A-Z]", w)}
                if words:
                    with self.subTest(command=command, option=option):
                        choices += 1
                        self.assertEqual(self.offers(command, option, ""), words)
        self.assertGreater(choices, 8)

    def test_value_behind_equals_sign(self):
        self.assertEqual(self.offers("run", *self.equals("--nvfp4", "f")), {"folded"})

    def test_models(self):
        self.assertEqual(self.offers("synth", "--model", ""), set(MODELS))
        self.assertEqual(self.offers("bench", "--model", "qwen3-3"), {"qwen3-30b-a3b"})

    def test_numbers_offer_nothing(self):
        self.assertEqual(self.offers("run", "--ranks", ""), set())

    def test_unknown_command(self):
        self.assertEqual(self.offers("frobnicate", "--"), set())

    def test_commands_without_arguments_offer_options(self):
        self.assertEqual(self.offers("info", "--m"), {"--measure"})


@unittest.skipUnless(shutil.which("bash"), "no bash")
class Bash(Completion, Case):
    def lines(self, *words):
        done = subprocess.run(["bash", "--norc", "-c", BASH, "bash", TOOL, *words], text=True,
                              capture_output=True, env={**os.environ, "COMPLETIONS": COMPLETIONS})
        self.assertEqual((done.returncode, done.stderr), (0, ""), words)
        return done.stdout.splitlines()

    def offers(self, *words):
        return {w for w in self.lines(*words) if w and not w.startswith("compopt")}

    def equals(self, option, value):
        return [option, "=", value]

    def test_nothing_behind_equals_sign_yet(self):
        self.assertEqual(self.offers("run", "--nvfp4", "="), {"exact", "folded"})

    def test_files_and_directories(self):
        # By itself readline adds files where the function offers nothing.
        self.assertEqual(self.lines("run", ""), [""])
        self.assertEqual(self.lines("run", "--input", "")[-2:], ["compopt -o default", ""])
        self.assertEqual(self.lines("synth", "--out", "")[-2:], ["compopt -o dirnames", ""])
        self.assertEqual(self.lines("run", "--ranks", ""),
                         ["compopt +o default +o bashdefault", ""])

    def test_is_registered(self):
        done = subprocess.run(["bash", "--norc", "-c",
                               f"source '{COMPLETIONS}/megamoe.bash'; complete -p megamoe"],
                              capture_output=True, text=True)
        self.assertIn("-F _megamoe megamoe", done.stdout)


@unittest.skipUnless(shutil.which("zsh"), "no zsh")
class Zsh(Completion, Case):
    def setUp(self):
        super().setUp()
        self.hits = self.path("hits")
        self.files = self.path("files")
        os.makedirs(os.path.join(self.files, "directory"))
        open(os.path.join(self.files, "file"), "w").close()
        environment = {**os.environ, "COMPLETIONS": COMPLETIONS, "HITS": self.hits,
                       "TERM": "dumb", "HOME": self.directory,
                       "PATH": os.path.dirname(TOOL) + ":" + os.environ["PATH"]}
        try:
            pid, self.terminal = pty.fork()
        except OSError as error:
            self.skipTest(f"no pseudo-terminal: {error}")
        if pid == 0:
            os.chdir(self.files)
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self.addCleanup(os.waitpid, pid, 0)
        self.addCleanup(os.close, self.terminal)
        self.type(f" source '{HERE}/completion.zsh'; : >$HITS; print END >>$HITS\n")
        self.wait()

    def type(self, text):
        os.write(self.terminal, text.encode())

    def wait(self):
        """The lines before END, as soon as it is there."""
        shown, until = b"", time.monotonic() + 60
        while time.monotonic() < until:
            if select.select([self.terminal], [], [], 0.02)[0]:
                shown += os.read(self.terminal, 65536)
            if os.path.exists(self.hits):
                with open(self.hits) as file:
                    lines = file.read().splitlines()
                if lines[-1:] == ["END"]:
                    return lines[:-1]
        self.fail(f"zsh does not answer: {shown!r}")

    def offers(self, *words):
        os.truncate(self.hits, 0)
        self.type(" ".join(["\x15" + os.path.basename(TOOL), *words]) + "\t")
        return {hit.rstrip("=") for hit in self.wait()}

    def equals(self, option, value):
        return [f"{option}={value}"]

    def test_files_and_directories(self):
        self.assertEqual(self.offers("run", ""), {"directory", "file"})
        self.assertEqual(self.offers("run", "--input", ""), {"directory", "file"})
        self.assertEqual(self.offers("synth", "--out", ""), {"directory"})


if __name__ == "__main__":
    unittest.main()
