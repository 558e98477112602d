# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/several-ranks.md that start ranks, as they stand there, under the real launchers."""
import os
import re
import shutil
import socket
import subprocess
import unittest

from tool import TOOL, Case

SOURCE = os.environ["MEGAMOE_SOURCE"]
TORCHRUN = os.path.join(SOURCE, "build", "python", "bin", "torchrun")


def printed():
    """The commands under "Start it" by their first word; what stands right of them is a remark."""
    with open(os.path.join(SOURCE, "docs", "several-ranks.md")) as file:
        section = file.read().split("\n## Start it\n")[1].split("\n|")[0]
    blocks = re.findall(r"(?:^    .+\n)+", section, re.M)
    commands = [re.sub(r"(?m)(?<=\S) {3,}\S.*$", "", block) for block in blocks]
    return {command.split()[0]: command for command in commands}


class Launchers(Case):
    def setUp(self):
        super().setUp()
        checkpoint = self.synth(name="ckpt")
        self.checksum = self.good_json("run", checkpoint)["checksum"]
        # Ports that no other test of this machine uses at the time.
        self.holders = [socket.socket() for _ in range(2)]
        for holder in self.holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        ports = [str(holder.getsockname()[1]) for holder in self.holders]
        path = os.path.dirname(TOOL) + os.pathsep + os.environ["PATH"]
        self.environment = {**os.environ, "PATH": path, "MEGAMOE_PORT": ports[0],
                            "PET_MASTER_PORT": ports[1]}

    def tearDown(self):
        for holder in self.holders:
            holder.close()
        super().tearDown()

    def check(self, first, instead=None, **environment):
        command = printed()[first]
        if instead:
            command = command.replace(first, instead, 1)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300,
                              cwd=self.directory, env={**self.environment, **environment})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("4 ranks of ", done.stdout)
        self.assertIn(self.checksum, done.stdout)
        self.assertEqual(done.stdout.count("16 of 16 rows equal the reference"), 1)

    def test_every_line_is_tested(self):
        self.assertEqual(sorted(printed()), ["for", "megamoe", "mpirun", "srun", "torchrun"])

    def test_own(self):
        self.check("megamoe")

    def test_shell(self):
        self.check("for")

    def test_torchrun(self):
        torchrun = TORCHRUN if os.path.exists(TORCHRUN) else shutil.which("torchrun")
        if not torchrun:
            self.skipTest("no torchrun here: scripts/python-env installs it")
        self.check("torchrun", torchrun)

    def test_open_mpi(self):
        if not shutil.which("mpirun.openmpi"):
            self.skipTest("no Open MPI here: scripts/install-deps mpi installs it")
        self.check("mpirun", "mpirun.openmpi", OMPI_ALLOW_RUN_AS_ROOT="1",
                   OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_plm="isolated",
                   OMPI_MCA_rmaps_base_oversubscribe="1")

    def test_mpich(self):
        if not shutil.which("mpirun.mpich"):
            self.skipTest("no MPICH here: scripts/install-deps mpi installs it")
        self.check("mpirun", "mpirun.mpich")

    def test_slurm(self):
        # allocated/idle/other/total processors
        processors = subprocess.run(["bash", "-c", "timeout 20 sinfo --noheader --format %C"],
                                    capture_output=True, text=True).stdout.split()
        if not any(int(text.split("/")[1]) >= 4 for text in processors):
            self.skipTest("no Slurm cluster here that has 4 idle processors")
        self.check("srun")


if __name__ == "__main__":
    unittest.main()
