#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""megamoe trace: a forward as events that nest, from one rank and from several."""
import json
import os
import shutil
import unittest
from collections import Counter, defaultdict

from tool import TOOL, Case

PHASES = {"count", "dispatch", "fc1", "fc2", "combine"}
SMALL = ["--geometry", "A", "--experts", 8, "--tokens", 24, "--threads", 2]


class Trace(Case):
    def trace(self, *arguments, out="trace.json"):
        done = self.good_json("trace", *arguments, "--out", self.path(out))
        self.assertEqual(done["trace"], self.path(out))
        return done

    def read(self, out="trace.json"):
        with open(self.path(out)) as file:
            return json.load(file)

    def spans(self, trace):
        """{(pid, tid): spans in the order of the file}, whose form is checked."""
        threads, named = defaultdict(list), set()
        for event in trace["traceEvents"]:
            self.assertIn(event["ph"], ["X", "M"])
            place = event["pid"], event["tid"]
            if event["ph"] == "M":
                if event["name"] == "thread_name":
                    self.assertNotIn(place, named)
                    named.add(place)
                continue
            self.assertIn(place, named)
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreaterEqual(event["dur"], 0)
            self.assertTrue(event["name"])
            threads[place].append(event)
        return threads

    def check_nesting(self, threads):
        """In a thread each event begins after the one before and lies in those still open."""
        for place, events in threads.items():
            open_ends, last = [], 0
            for event in events:
                begin, end = event["ts"], event["ts"] + event["dur"]
                self.assertGreaterEqual(begin, last, place)
                last = begin
                # Nine digits are written: ends may be off by as much.
                while open_ends and open_ends[-1] <= begin + 1e-6 * end:
                    open_ends.pop()
                if open_ends:
                    self.assertLessEqual(end, open_ends[-1] * (1 + 1e-6), (place, event))
                open_ends.append(end)

    def test_one_rank(self):
        done = self.trace(*SMALL)
        trace = self.read()
        threads = self.spans(trace)
        self.check_nesting(threads)
        self.assertEqual(len(threads), 2)
        events = [event for of in threads.values() for event in of]
        self.assertEqual(len(events), done["spans"])
        self.assertEqual((done["ranks"], done["dropped"], trace["dropped"]), (1, 0, 0))
        self.assertEqual({event["cat"] for event in events}, PHASES)
        self.assertEqual((len(trace["loads"]), sum(trace["loads"])), (8, 24 * 8))
        for phase in ["fc1", "fc2"]:
            loads = {e["args"]["expert"]: e["args"]["tokens"] for e in events if e["cat"] == phase}
            self.assertEqual(loads, {e: n for e, n in enumerate(trace["loads"]) if n})
        self.assertAlmostEqual(max(e["ts"] + e["dur"] for e in events), trace["total_us"],
                               delta=1e-3 * trace["total_us"])
        self.assertIn("geometry A", trace["title"])
        about = trace["otherData"]
        self.assertRegex(about["command"], "^megamoe trace --geometry A ")
        self.assertEqual(about["device"], "cpu")
        self.assertNotIn("gpu", about)
        for name in ["date", "model", "host", "version", "commit"]:
            self.assertTrue(about[name])
        self.assertEqual(os.listdir(self.directory), ["trace.json"])

    def test_ranks_that_are_processes(self):
        done = self.good_json("launch", "-n", 2, "--", TOOL, "trace", *SMALL, "--threads", 1,
                              "--out", self.path("trace.json"))
        trace = self.read()
        threads = self.spans(trace)
        self.check_nesting(threads)
        self.assertEqual({pid for pid, _ in threads}, {0, 1})
        self.assertEqual((done["ranks"], len(trace["loads"])), (2, 8))
        self.assertEqual(sum(trace["loads"]), 2 * 24 * 8)
        names = Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "M")
        self.assertEqual((names["process_name"], names["thread_name"]), (2, 2))

    def test_a_layer_of_a_file(self):
        checkpoint = self.synth()
        self.trace(checkpoint, "--tokens", 5, "--threads", 1, "--room", 3)
        trace = self.read()
        self.assertEqual(len(self.spans(trace)), 1)
        self.assertGreater(trace["dropped"], 0)
        self.assertIn("dropped", self.good("trace", checkpoint, "--tokens", 5, "--threads", 1,
                                           "--room", 3, "--out", self.path("x.json")))

    @unittest.skipUnless(shutil.which("gnuplot"), "needs gnuplot")
    def test_pictures(self):
        self.trace(*SMALL)
        for kind, parts in [("timeline", ["FC1", "FC2", "combine", "thread"]),
                            ("load", ["expert", "routes"])]:
            self.good("plot", self.path("trace.json"), "--kind", kind, "--out",
                      self.path("picture.svg"))
            with open(self.path("picture.svg")) as file:
                text = file.read()
            for part in parts:
                self.assertIn(part, text)

    def test_refusals(self):
        self.fails(2, ["--out"], "trace", *SMALL)
        self.fails(2, ["PATH", "--geometry"], "trace", "x", "--geometry", "A", "--out", "y")
        self.fails(2, ["--geometry", "flash"], "trace", "--geometry", "small", "--out", "y")
        self.fails(2, ["--room"], "trace", "--room", 0, "--out", "y")
        self.fails(2, ["missing"], "trace", self.path("missing"), "--out", "y")
        for option in [["--warm"], ["--token-tile", 16], ["--lag", 2]]:
            self.fails(2, [option[0], "GPU"], "trace", *option, "--out", "y")
        self.fails(2, ["absent/x.json", "No such file"], "trace", *SMALL, "--out",
                   self.path("absent/x.json"))
        os.mkdir(self.path("x.json"))
        self.fails(2, ["x.json", "directory"], "trace", *SMALL, "--out", self.path("x.json"))
        self.assertEqual(os.listdir(self.directory), ["x.json"])


if __name__ == "__main__":
    unittest.main()
