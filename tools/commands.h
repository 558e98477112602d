/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMANDS_H
#define COMMANDS_H

/* X(name, summary): cmd_<name>(argc, argv) in cmd_<name>.c returns the exit code. */
#define COMMAND_LIST(X)                                                                            \
    X(info, "Show the library, the device and what it can do at best.")                            \
    X(synth, "Write a checkpoint of a public model's geometry with synthetic weights.")            \
    X(inspect, "Describe a checkpoint or prepared file, layer by layer.")                          \
    X(prepare, "Pack the experts of a layer for a device into a file.")                            \
    X(convert, "Write a checkpoint's expert layers as another family stores them.")                \
    X(run, "Run an expert layer over ranks.")                                                      \
    X(launch, "Start a program once for each rank on this machine.")                               \
    X(verify, "Compare the hashes of a prepared file with its bytes.")                             \
    X(bench, "Measure an expert layer beside the machine's ceilings.")                             \
    X(tune, "Find the fastest plan of a GPU's forwards and keep it.")                              \
    X(compare, "Compare two results of bench.")                                                    \
    X(scenario, "Measure a stack of expert layers while requests arrive.")                         \
    X(trace, "Record what the threads of one forward did when.")                                   \
    X(plot, "Draw what bench and trace have measured.")

#define X(name, summary) int cmd_##name(int argc, char **argv);
COMMAND_LIST(X)
#undef X

#endif
