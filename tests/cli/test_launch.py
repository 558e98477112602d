# SPDX-License-Identifier: Apache-2.0
"""Processes as ranks: the launcher, and a run that is spread over them."""
import os
import signal
import socket
import subprocess
import sys
import time
import unittest

from tool import MODELS, TOOL, Case, read_safetensors

NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MEGAMOE_PORT",
         "MEGAMOE_JOB"]


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Launch(Case):
    def launch(self, ranks, *program, **options):
        return subprocess.run([TOOL, "launch", "-n", str(ranks), "--", *map(str, program)],
                              capture_output=True, text=True, timeout=120, **options)

    def script(self, text):
        path = self.path("program.py")
        with open(path, "w") as file:
            file.write("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        return [sys.executable, path]

    def wait_for(self, condition):
        until = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)

    def start(self, ranks, *program):
        """The launcher, and its processes once all have written their numbers."""
        launcher = subprocess.Popen([TOOL, "launch", "-n", str(ranks), "--", *program],
                                    stderr=subprocess.PIPE, text=True, cwd=self.directory)
        files = [self.path(f"{rank}.pid") for rank in range(ranks)]
        self.wait_for(lambda: all(os.path.exists(file) for file in files))
        return launcher, [int(open(file).read()) for file in files]

    WRITE_NUMBER = """
with open(f"{rank}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{rank}.tmp", f"{rank}.pid")
"""


class Programs(Launch):
    def test_environment(self):
        # One write, as lines of several processes would mix.
        program = self.script(f"""
names = {NAMES!r}
os.write(1, (" ".join(os.environ[n] for n in names) + " " + sys.stdin.read() + "\\n").encode())
""")
        done = self.launch(3, *program, input="not for ranks")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = sorted(line.split() for line in done.stdout.splitlines())
        port, job = lines[0][5:7]
        self.assertEqual(lines, [[str(r), str(r), "3", "3", "127.0.0.1", port, job]
                                 for r in range(3)])
        again = self.launch(1, *program).stdout.split()
        self.assertNotEqual(again[6], job)

    def test_first_bad_exit_code(self):
        done = self.launch(4, *self.script(
            "if rank == 2: sys.exit(7)\ntime.sleep(60 if rank else 0)\n"))
        self.assertEqual(done.returncode, 7)
        self.assertEqual(done.stderr, "megamoe: launch: rank 2 ended with exit status 7\n")

    def test_signal_of_a_rank(self):
        done = self.launch(2, *self.script(
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"))
        self.assertEqual(done.returncode, 128 + signal.SIGKILL)
        self.assertIn("rank 1 was ended by signal 9 (Killed)", done.stderr)

    def test_ranks_that_do_not_want_to_end_are_killed(self):
        start = time.monotonic()
        done = self.launch(2, *self.script(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if rank == 1: time.sleep(1); sys.exit(3)\ntime.sleep(60)\n"))
        self.assertEqual(done.returncode, 3)
        self.assertLess(time.monotonic() - start, 20)

    def test_signals_are_passed_on(self):
        launcher, _ = self.start(2, *self.script(
            "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(40 + rank))\n" +
            self.WRITE_NUMBER + "time.sleep(60)\n"))
        launcher.send_signal(signal.SIGUSR1)
        self.assertIn(launcher.wait(30), [40, 41])
        launcher.stderr.close()

    def test_nothing_outlives_a_killed_launcher(self):
        launcher, processes = self.start(3, *self.script(self.WRITE_NUMBER + "time.sleep(60)\n"))
        launcher.kill()
        launcher.wait()
        launcher.stderr.close()
        self.wait_for(lambda: not any(map(alive, processes)))

    def test_program_that_is_not_there(self):
        done = self.launch(2, self.path("nowhere"))
        self.assertEqual(done.returncode, 127)
        self.assertIn("nowhere cannot be started: No such file", done.stderr)

    def test_usage(self):
        self.fails(2, ["--ranks is missing"], "launch", "--", "true")
        self.fails(2, ["--ranks 0"], "launch", "--ranks", "0", "--", "true")
        self.fails(2, ["no program after --"], "launch", "-n", "2")
        self.fails(2, ["no program after --"], "launch", "-n", "2", "--")
        self.fails(2, ["unexpected argument true"], "launch", "-n", "2", "true")


class Run(Launch):
    def run_ranks(self, ranks, *arguments):
        done = self.launch(ranks, TOOL, "run", *arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_same_bits(self):
        for model in MODELS[::3]:
            checkpoint = self.synth(model, name=model)
            alone = self.path("alone.safetensors")
            self.good("run", checkpoint, "--tokens", 13, "--output", alone)
            for ranks in [2, 4, 8]:
                with self.subTest(model=model, ranks=ranks):
                    out = self.path(f"{ranks}.safetensors")
                    text = self.run_ranks(ranks, checkpoint, "--tokens", 13, "--verify",
                                          "--output", out)
                    self.assertIn("13 of 13 rows equal the reference", text)
                    self.assertIn(f"{ranks} ranks of 1 thread", text)
                    self.assertEqual(read_safetensors(out), read_safetensors(alone))

    def test_rows_that_are_gathered_in_parts(self):
        checkpoint = self.synth("qwen3-30b-a3b")
        rows = 40000 # of 128 channels: more than a rank's part that is sent at a time
        alone = self.good_json("run", checkpoint, "--tokens", rows, "--seed", 5)
        text = self.run_ranks(3, checkpoint, "--tokens", rows, "--seed", 5)
        self.assertIn(alone["checksum"], text)

    def test_more_ranks_than_tokens(self):
        checkpoint = self.synth()
        text = self.run_ranks(5, checkpoint, "--tokens", 2, "--verify")
        self.assertIn("2 of 2 rows equal", text)

    def test_prepared_and_json(self):
        import json
        checkpoint = self.synth()
        file = self.path("layer.mmoe")
        self.good("prepare", checkpoint, "--out", file)
        alone = self.good_json("run", file)
        done = json.loads(self.run_ranks(4, file, "--json"))
        for name in ["checksum", "layer_bytes", "tokens", "experts"]:
            self.assertEqual(done[name], alone[name])
        self.assertEqual(done["ranks"], 4)

    def test_threads_for_the_cores_of_a_rank(self):
        cores = sorted(os.sched_getaffinity(0))[:2]
        if len(cores) < 2:
            self.skipTest("one core")
        checkpoint = self.synth()
        # All ranks on both cores, each rank on one of its own, and one alone on two.
        for masks, threads in [([cores] * 2, 1), ([cores] * 4, 1), ([cores[:1], cores[1:]], 1),
                               ([cores, cores[:1]], 2)]:
            bind = self.script(f"os.sched_setaffinity(0, {masks!r}[rank])\n"
                               "os.execv(sys.argv[1], sys.argv[1:])\n")
            done = self.launch(len(masks), *bind, TOOL, "run", checkpoint, "--verify")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(f"{len(masks)} ranks of {threads} thread", done.stdout)

    def test_bad_input_ends_all(self):
        done = self.launch(3, TOOL, "run", self.path("nowhere"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("nowhere", done.stderr)

    def test_ranks_of_both_kinds(self):
        done = self.launch(2, TOOL, "run", self.synth(), "--ranks", "2")
        self.assertEqual(done.returncode, 2)
        self.assertIn("a launcher has started 2 ranks; --ranks is for", done.stderr)

    def test_by_hand_as_other_launchers_do(self):
        checkpoint = self.synth()
        alone = self.good_json("run", checkpoint)
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ranks = [subprocess.Popen(
                [TOOL, "run", checkpoint], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                     "MEGAMOE_PORT": str(holder.getsockname()[1])}) for rank in range(2)]
            out = [rank.communicate(timeout=60)[0] for rank in ranks]
        self.assertIn(alone["checksum"], out[0])
        self.assertEqual(out[1], "")

    def test_two_hosts(self):
        # They meet over the link between two hosts and are told, both, that this is not for several.
        hosts = os.path.join(os.environ["MEGAMOE_SOURCE"], "tests", "hosts.sh")
        done = subprocess.run([hosts, "sh", "-c", '''
            export WORLD_SIZE=2 MASTER_ADDR=10.77.0.1
            RANK=0 $TOOL run $CHECKPOINT &
            $HOSTS 10.77.0.2 RANK=1 $TOOL run $CHECKPOINT && exit 1
            wait $! && exit 1
            exit 0'''], capture_output=True, text=True, timeout=60,
            env={**os.environ, "TOOL": TOOL, "CHECKPOINT": self.synth(), "HOSTS": hosts})
        if done.returncode == 77:
            self.skipTest(done.stdout.strip())
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        self.assertEqual(done.stderr.count("megamoe: ranks 0 and 1 are on different hosts"), 2,
                         done.stderr)

    def test_two_jobs_at_once(self):
        checkpoint = self.synth()
        alone = self.good_json("run", checkpoint)
        jobs = [subprocess.Popen([TOOL, "launch", "-n", "3", "--", TOOL, "run", checkpoint],
                                 stdout=subprocess.PIPE, text=True) for _ in range(3)]
        for job in jobs:
            self.assertIn(alone["checksum"], job.communicate(timeout=60)[0])
            self.assertEqual(job.returncode, 0)


if __name__ == "__main__":
    unittest.main()
