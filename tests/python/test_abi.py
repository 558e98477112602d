# SPDX-License-Identifier: Apache-2.0
"""The structs and functions of megamoe._abi are those of the headers: a C program tells."""
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from megamoe import _abi

INCLUDE = os.path.join(os.environ["MEGAMOE_SOURCE"], "include")
CONSTANTS = {
    **{f"MEGAMOE_{name}": getattr(_abi, name) for name in (
        "OK EINVAL ENOMEM EIO EFORMAT ENOTFOUND EUNSUPPORTED EINEXACT ECAPACITY EID ESTATE "
        "ETIMEDOUT EPEER EDEVICE ECHECK DTYPE_BF16 DTYPE_F32 DTYPE_E4M3 DTYPE_E8M0 DTYPE_I32 "
        "DTYPE_I64 DTYPE_I8 GATE UP DOWN").split()},
    **{f"MEGAMOE_{prefix}_{name.upper().replace('-', '_')}": value
       for prefix, table in (("FORMAT", _abi.FORMATS), ("NVFP4", _abi.NVFP4_MODES),
                             ("ACCUMULATE", _abi.ACCUMULATE), ("SCALE", _abi.INPUT_SCALES),
                             ("SUM", _abi.SUMS), ("ACTIVATIONS", _abi.ACTIVATIONS), ("ROUTER", _abi.ROUTER_RULES))
       for name, value in table.items()},
}


class Abi(unittest.TestCase):
    @unittest.skipUnless(shutil.which("cc"), "no C compiler")
    def test_structs_and_constants(self):
        lines, expected = [], []

        def want(text, value):
            lines.append(f'printf("%ld\\n", (long)({text}));')
            expected.append((text, value))

        for name, struct in _abi.STRUCTS.items():
            want(f"sizeof({name})", ctypes.sizeof(struct))
            for member, *_ in struct._fields_:
                field = getattr(struct, member)
                want(f"offsetof({name}, {member})", field.offset)
                want(f"sizeof((({name} *)0)->{member})", field.size)
        for name, value in CONSTANTS.items():
            want(name, value)
        with tempfile.TemporaryDirectory() as folder:
            source, program = os.path.join(folder, "abi.c"), os.path.join(folder, "abi")
            with open(source, "w") as file:
                file.write('#include <megamoe/megamoe.h>\n#include <stdio.h>\nint main(void) {\n' +
                           "\n".join(lines) + "\nreturn 0; }\n")
            subprocess.run(["cc", "-I", INCLUDE, source, "-o", program], check=True)
            numbers = subprocess.run([program], check=True, capture_output=True).stdout.split()
        self.assertEqual(len(numbers), len(expected))
        for number, (text, value) in zip(numbers, expected):
            self.assertEqual(int(number), value, text)

    def test_argument_counts(self):
        text = "".join(header.read_text() for header in Path(INCLUDE, "megamoe").glob("*.h"))
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        for name, (_, arguments) in _abi.PROTOTYPES.items():
            found = re.search(rf"\b{name}\(([^)]*)\)", text)
            self.assertIsNotNone(found, name)
            declared = found.group(1).strip()
            count = 0 if declared == "void" else declared.count(",") + 1
            self.assertEqual(len(arguments), count, name)


if __name__ == "__main__":
    unittest.main()
