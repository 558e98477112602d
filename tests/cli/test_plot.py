#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""megamoe plot: pictures of stored results, looked at as far as a program can."""
import json
import os
import random
import shutil
import struct
import unittest
import xml.etree.ElementTree
import zlib

import tool

RESULTS = os.path.join(os.environ["MEGAMOE_SOURCE"], "bench", "results")
FLASH = [os.path.join(RESULTS, "h200", f"flash-{name}.json")
         for name in ["mxfp4", "nvfp4-exact", "nvfp4-folded"]]
CPU = os.path.join(RESULTS, "zen4-2core", "a-mxfp4-int8-2.json")


def texts_of_svg(path):
    """The words of a picture that is well-formed and has something drawn in it."""
    root = xml.etree.ElementTree.parse(path).getroot()
    tags = [element.tag.split("}")[1] for element in root.iter()]
    assert root.tag == "{http://www.w3.org/2000/svg}svg", root.tag
    assert tags.count("path") + tags.count("polygon") > 10, tags
    return " ".join("".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("}text"))


def png_rows(path):
    """(width, height, bytes of all rows) of a PNG whose every checksum holds."""
    with open(path, "rb") as file:
        data = file.read()
    assert data[:8] == b"\x89PNG\r\n\x1a\n", data[:8]
    at, body, size = 8, b"", None
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        content = data[at + 8:at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length:at + 12 + length])[0] == zlib.crc32(
            kind + content)
        if kind == b"IHDR":
            size = struct.unpack(">II", content[:8])
        body += content if kind == b"IDAT" else b""
        at += 12 + length
    assert kind == b"IEND", kind
    return *size, zlib.decompress(body)


class Plot(tool.Case):
    def file(self, name, value):
        with open(self.path(name), "w") as file:
            json.dump(value, file)
        return self.path(name)

    def svg(self, *arguments):
        out = self.path("picture.svg")
        self.assertEqual(self.good_json("plot", *arguments, "--out", out), {"picture": out})
        return texts_of_svg(out)

    def nothing_left(self, *names):
        self.assertEqual(sorted(os.listdir(self.directory)), sorted(names))


@unittest.skipUnless(shutil.which("gnuplot"), "needs gnuplot")
class Drawn(Plot):
    def test_latency(self):
        words = self.svg(*FLASH)
        for part in ["DeepSeek-V4-Flash", "NVIDIA H200", "MXFP4", "NVFP4 exact", "NVFP4 folded",
                     "floor of MXFP4", "published", "target", "tokens", "microseconds", "8192"]:
            self.assertIn(part, words)
        self.assertNotIn("floor of NVFP4 folded", words)  # that of NVFP4 exact
        self.nothing_left("picture.svg")

    def test_every_file_of_bench(self):
        drawn = 0
        for folder, _, names in os.walk(RESULTS):
            for name in sorted(names):
                path = os.path.join(folder, name)
                if not name.endswith(".json"):
                    continue
                with open(path) as file:
                    run = json.load(file)
                points = run.get("points", []) if isinstance(run, dict) else []
                if not points or not {"forward_us", "median_ms"} & set(points[0]):
                    continue  # another program's
                for kind in ["latency", "roofline"]:
                    self.assertIn("FLOP/s" if kind == "roofline" else "microseconds",
                                  self.svg(path, "--kind", kind))
                drawn += 1
        self.assertGreater(drawn, 10)

    def test_png(self):
        out = self.path("picture.png")
        for files, kind in [(FLASH, "latency"), (FLASH, "ratio"), (FLASH, "roofline"),
                            ([CPU], "ratio")]:
            self.good("plot", *files, "--kind", kind, "--out", out)
            width, height, rows = png_rows(out)
            self.assertGreater(min(width, height), 900)
            stride = len(rows) // height
            different = {rows[at:at + stride] for at in range(0, len(rows), stride)}
            self.assertGreater(len(different), height // 10, kind)
        self.nothing_left("picture.png")

    def test_ratios(self):
        words = self.svg(*FLASH, "--kind", "ratio")
        self.assertIn("published time / time", words)
        with open(FLASH[0]) as file:
            first = json.load(file)["points"][0]
        self.assertIn(f"{first['public_us'] / first['forward_us']['median']:.2f}", words)
        self.assertIn("time with E4M3 / time", self.svg(CPU, "--kind", "ratio"))
        runs = [os.path.join(RESULTS, "zen4-2core", f"a-mxfp4-{n}.json") for n in (1, 2)]
        words = self.svg(*runs, "--kind", "ratio")
        self.assertIn("time of MXFP4, 1 thread / time", words)
        self.fails(2, ["second file"], "plot", runs[0], "--kind", "ratio", "--out",
                   self.path("x.svg"))

    def test_arms(self):
        with open(FLASH[0]) as file:
            run = json.load(file)
        points = [{**p, "public_us": None} for p in run.pop("points")]
        slower = [{**p, "forward_us": {"median": 2 * p["forward_us"]["median"]}} for p in points]
        file = self.file("arms.json", {
            **run, "schema_version": 1, "arms": [
                {"arm": "base", "points": points}, {"arm": "token-tile=64", "points": slower}],
            "ratios": [{"arm": "token-tile=64", "base": "base", "tokens": p["tokens"],
                        "median": 2.0, "low": 1.9, "high": 2.1, "confidence": 0.95}
                       for p in points]})
        words = self.svg(file)
        for part in ["MXFP4, base", "MXFP4, token-tile=64", "floor of MXFP4, base"]:
            self.assertIn(part, words)
        words = self.svg(file, "--kind", "ratio")
        for part in ["time of base / time", "95 %", "MXFP4, token-tile=64"]:
            self.assertIn(part, words)
        self.assertNotIn("MXFP4, base", words)

    def test_comparison(self):
        points = [{"arm": arm, "tokens": tokens, "a_us": 10, "b_us": 8, "ratio": 0.8, "low": 0.7,
                   "high": 0.9} for arm in ["base", "lag=2"] for tokens in [1, 64]]
        file = self.file("compared.json", {"a": "x/old.json", "b": "new.json", "points": points})
        words = self.svg(file)
        for part in ["time of old.json / time of new.json", "base", "lag=2", "64"]:
            self.assertIn(part, words)
        self.fails(2, ["comparison", "ratio"], "plot", file, "--kind", "latency", "--out",
                   self.path("x.svg"))
        self.fails(2, ["point 0"], "plot", self.file("bad.json", {
            "a": "x", "b": "y", "points": [{"arm": "base"}]}), "--out", self.path("x.svg"))

    def test_load(self):
        seed = random.randrange(1 << 32)
        draw = random.Random(seed)
        rows = [[draw.randrange(100) for _ in range(32)] for _ in range(4)]
        words = self.svg(self.file("loads.json", {"loads": rows, "rows": "layer", "title": "Loads"}))
        for part in ["Loads", "layer", "expert", "routes"]:
            self.assertIn(part, words, seed)
        self.assertIn("even share", self.svg(self.file("one.json", {"loads": rows[0]})))
        ids = [draw.sample(range(16), 4) for _ in range(200)] + [[-1, 3, -1, -1]]
        words = self.svg(self.file("ids.json", {"topk_ids": ids, "experts": 16}))
        self.assertIn("tokens, in bands", words)

    def test_load_of_recorded_routes(self):
        out = self.path("out.safetensors")
        self.good("run", self.synth(), "--tokens", 40, "--out", out)
        words = self.svg(out)
        for part in ["expert", "token", "routes"]:
            self.assertIn(part, words)
        tool.write_safetensors(out, {"topk_ids": ("F32", [1, 2], tool.f32([0, 1]))})
        self.fails(2, ["topk_ids", "F32", "I32"], "plot", out, "--out", self.path("x.svg"))
        tool.write_safetensors(out, {"other": ("F32", [1, 2], tool.f32([0, 1]))})
        self.fails(2, ["out.safetensors", "topk_ids"], "plot", out, "--out", self.path("x.svg"))
        tool.write_safetensors(out, {"topk_ids": ("I64", [2, 1], tool.i64([1, -5]))})
        self.fails(2, ["token 1, slot 0"], "plot", out, "--out", self.path("x.svg"))

    def test_timeline(self):
        events = [{"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": 5, "pid": pid, "tid": tid,
                   "args": {"worker": tid}}
                  for pid in range(2) for tid in range(3)
                  for name, cat, ts in [("count", "count", 0), ("FC1 e0 tile 1", "fc1", 5),
                                        ("FC2 e0 tile 1", "fc2", 10), ("combine", "combine", 15)]]
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "x"}})
        words = self.svg(self.file("trace.json", {"traceEvents": events, "title": "A forward"}))
        for part in ["A forward", "rank 0", "rank 1", "FC1", "FC2", "combine", "microseconds"]:
            self.assertIn(part, words)
        self.assertNotIn("dispatch", words)

    def test_words_mean_nothing_to_gnuplot(self):
        with open(FLASH[0]) as file:
            run = json.load(file)
        made = self.path("made")
        layer = f"it's `touch {made}` \" @x $(touch {made})\n!touch {made}\nset output '{made}'\n#"
        words = self.svg(self.file("run.json", {**run, "layer": layer}))
        self.assertIn("it's `touch", words)
        self.nothing_left("picture.svg", "run.json")

    def test_a_picture_that_is_there_is_replaced(self):
        out = self.path("picture.svg")
        with open(out, "w") as file:
            file.write("old")
        self.svg(FLASH[0])

    def test_out_that_cannot_be_written(self):
        self.fails(2, ["missing/x.svg", "No such file"], "plot", FLASH[0], "--out",
                   self.path("missing/x.svg"))
        os.mkdir(self.path("x.svg"))
        self.fails(2, ["x.svg", "directory"], "plot", FLASH[0], "--out", self.path("x.svg"))
        self.nothing_left("x.svg")


class Refused(Plot):
    def refused(self, parts, *arguments, env=None):
        out = self.path("x.svg")
        self.fails(2, parts, "plot", *arguments, "--out", out, env=env)
        self.assertFalse(os.path.exists(out))

    def test_usage(self):
        self.fails(2, ["FILE"], "plot", "--out", "x.svg")
        self.fails(2, ["--out"], "plot", FLASH[0])
        self.fails(2, ["--kind pie", "latency|roofline"], "plot", FLASH[0], "--kind", "pie")
        for out in ["x.pdf", "x", ".svg"]:
            self.fails(2, [out, ".svg", ".png"], "plot", FLASH[0], "--out", out)
        self.fails(2, ["unexpected argument"], "plot", *FLASH * 5, "--out", "x.svg")

    def test_files(self):
        self.refused(["absent.json"], self.path("absent.json"))
        with open(self.path("broken.json"), "w") as file:
            file.write('{"points": [\n')
        self.refused(["broken.json", "line 2"], self.path("broken.json"))
        self.refused(["is no result of bench"], self.file("other.json", {"a": 1}))
        self.refused(["is no result of bench"], self.file("list.json", [1]))
        self.refused(["no points"], self.file("none.json", {"points": []}))
        self.refused(["point 1", "tokens"], self.file("hole.json", {
            "points": [{"tokens": 1, "median_ms": 2}, {"tokens": "x", "median_ms": 2}]}))
        self.refused(["ceilings"], self.file("short.json", {
            "points": [{"tokens": 1, "median_ms": 2}]}), "--kind", "roofline")
        self.refused(["points"], FLASH[0], self.path("list.json"))
        self.refused(["no arms"], self.file("arms.json", {"arms": []}))
        self.refused(["no objects"], self.file("arms.json", {"arms": [1]}))
        self.refused(["more than 12"], self.file("arms.json", {
            "arms": [{"points": [{"tokens": 1, "median_ms": 1}]}] * 13}))

    def test_kinds_need_what_they_show(self):
        self.refused(["--kind load", "topk_ids"], FLASH[0], "--kind", "load")
        self.refused(["--kind timeline", "traceEvents"], FLASH[0], "--kind", "timeline")
        loads = self.file("loads.json", {"loads": [1, 2]})
        self.refused(["one file"], loads, loads)

    def test_loads(self):
        for value, parts in [([], ["0 experts"]), ([[1, 2], [3]], ["row 1", "1 experts"]),
                             ([1, "a"], ["expert 1"]), ([[1], [-2]], ["row 1"])]:
            self.refused(parts, self.file("loads.json", {"loads": value}))
        self.refused(["experts"], self.file("ids.json", {"topk_ids": [[1]]}))
        self.refused(["token 1, slot 0", "3"],
                     self.file("ids.json", {"topk_ids": [[1], [4]], "experts": 4}))

    def test_traces(self):
        self.refused(["no spans"], self.file("trace.json", {"traceEvents": []}))
        self.refused(["event 0"], self.file("trace.json", {
            "traceEvents": [{"ph": "X", "cat": "fc1", "ts": 1}]}))

    def test_without_gnuplot(self):
        self.refused(["PATH", "gnuplot-nox"], FLASH[0], env={"PATH": self.directory})
        fake = self.path("gnuplot")
        with open(fake, "w") as file:
            file.write("#!/bin/sh\necho 'line 3: it has no such terminal' >&2\nexit 1\n")
        os.chmod(fake, 0o755)
        self.refused(["not drawn", "it has no such terminal"], FLASH[0],
                     env={"PATH": self.directory})
        with open(fake, "w") as file:
            file.write("#!/bin/sh\nexit 0\n")
        self.refused(["not drawn"], FLASH[0], env={"PATH": self.directory})
        self.nothing_left("gnuplot")


if __name__ == "__main__":
    unittest.main()
