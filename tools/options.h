/* SPDX-License-Identifier: Apache-2.0 */
/* Command lines: a command declares its options once; parsing and --help follow from the table. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,    /* bool */
    OPTION_INTEGER, /* int64_t, min..max */
    OPTION_NUMBER,  /* double, min..max */
    OPTION_TEXT,    /* const char * */
    OPTION_CHOICE,  /* int: index of the word in `value`, "word|word" */
    OPTION_LIST     /* option_list: may be given several times */
} option_kind;

enum { OPTION_MAX_LIST = 16 };

typedef struct option_list {
    const char *items[OPTION_MAX_LIST];
    int n;
} option_list;

typedef struct option_spec {
    const char *name; /* without the dashes */
    option_kind kind;
    void *target; /* holds the default until the option is given */
    /*
     * What --help calls the argument; NULL for flags. Shell completions read it there: of
     * "word|word" they offer the words without capitals, names of files for FILE and PATH,
     * directories for DIR.
     */
    const char *value;
    const char *help;
    double min, max;
} option_spec;

typedef struct command_syntax {
    const char *name;
    const char *arguments; /* "PATH", or "" */
    const char *summary;
    const char *example;
    const option_spec *options;
    size_t n_options;
    int min_arguments, max_arguments;
} command_syntax;

/* The option that every command has. */
#define OPTION_JSON(target)                                                                        \
    { "json", OPTION_FLAG, target, NULL, "print one JSON object", 0, 0 }

/* An index that is a megamoe_activation_type. */
#define OPTION_ACTIVATIONS(target)                                                                 \
    { "activations", OPTION_CHOICE, target, "e4m3|int8", "CPU: int8 is faster (e4m3)", 0, 0 }

enum { OPTION_MAX_ARGUMENTS = 12 };

/*
 * Parses argv[1..]; arguments that are no options go to `arguments`, the rest of which is NULL.
 * Returns true if the command should run, else the exit code is in *exit_code (after --help or a
 * usage error, which has been printed).
 */
bool options_parse(const command_syntax *syntax, int argc, char **argv,
                   const char *arguments[OPTION_MAX_ARGUMENTS], int *exit_code);

/* Sets the option's target, of a flag to true. Prints the error and returns false. */
bool option_set(const option_spec *option, const char *text);

/*
 * The text that option_set would take for what the target holds; false where there is none (the
 * target is a list, a flag that is not set or a default that cannot be asked for).
 */
enum { OPTION_TEXT_BYTES = 32 };
bool option_get(const option_spec *option, char buffer[OPTION_TEXT_BYTES], const char **text);

/* The option of that name; NULL if there is none. */
const option_spec *option_find(const option_spec *options, size_t n, const char *name);

#endif
