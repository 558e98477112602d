/* SPDX-License-Identifier: Apache-2.0 */
/* The reader of one file, against files made byte by byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

/* A file of this length field and header, and data bytes 0, 1, 2, ... */
static const char *raw(uint64_t length, const char *header, size_t header_bytes,
                       size_t data_bytes) {
    const size_t bytes = 8 + header_bytes + data_bytes;
    uint8_t *file = calloc(1, bytes);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(length >> 8 * i);
    memcpy(file + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + header_bytes + i] = (uint8_t)i;
    const char *path = t_path("raw.safetensors");
    t_write_file(path, file, bytes);
    free(file);
    return path;
}

static const char *plain(const char *header, size_t data_bytes) {
    return raw(strlen(header), header, strlen(header), data_bytes);
}

static megamoe_status open_tensors(const char *path) {
    megamoe_checkpoint *file = NULL;
    const megamoe_status status = megamoe_tensors_open(path, &file);
    T_CHECK((file != NULL) == (status == MEGAMOE_OK));
    megamoe_checkpoint_close(file);
    return status;
}

/* Headers that are refused, each with what the message must say. */
static const struct {
    const char *header;
    size_t data_bytes;
    megamoe_status status;
    const char *parts[3];
} refused[] = {
#define ENTRY(dtype, shape, begin, end)                                                            \
    "{\"x.weight\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end  \
    "]}}"
    /* offsets against the file: mlx#3363 and others */
    {ENTRY("U8", "[9]", "0", "9"), 8, MEGAMOE_EFORMAT, {"x.weight", "[0, 9]", "8 bytes of data"}},
    {ENTRY("U8", "[8]", "0", "9223372036854775807"),
     8,
     MEGAMOE_EFORMAT,
     {"x.weight", "past the end"}},
    {ENTRY("U8", "[8]", "0", "9223372036854775808"), 8, MEGAMOE_EFORMAT, {"header is not valid"}},
    {ENTRY("U8", "[8]", "0", "18446744073709551624"), 8, MEGAMOE_EFORMAT, {"header is not valid"}},
    /* negative, reversed: audio.cpp#138 */
    {ENTRY("U8", "[4]", "8", "4"),
     8,
     MEGAMOE_EFORMAT,
     {"x.weight", "[8, 4]", "end before they begin"}},
    {ENTRY("U8", "[4]", "-1", "4"), 8, MEGAMOE_EFORMAT, {"x.weight", "[-1, 4]", "negative"}},
    {ENTRY("U8", "[4]", "0", "-4"), 8, MEGAMOE_EFORMAT, {"x.weight", "[0, -4]", "negative"}},
    {ENTRY("U8", "[8]", "0", "8.0"), 8, MEGAMOE_EFORMAT, {"x.weight", "two integers"}},
    {ENTRY("U8", "[8]", "0", "8e0"), 8, MEGAMOE_EFORMAT, {"x.weight", "two integers"}},
    {ENTRY("U8", "[8]", "0", "\"8\""), 8, MEGAMOE_EFORMAT, {"x.weight", "two integers"}},
    {ENTRY("U8", "[8]", "0", "4,8"), 8, MEGAMOE_EFORMAT, {"x.weight", "two integers"}},
    /* shape products that wrap: LiteRT#9255 and others */
    {ENTRY("U8", "[4294967296,4294967296]", "0", "0"),
     0,
     MEGAMOE_EFORMAT,
     {"x.weight", "4294967296", "overflows"}},
    {ENTRY("U8", "[2305843009213693952]", "0", "0"), 0, MEGAMOE_EFORMAT, {"x.weight", "overflows"}},
    {ENTRY("F64", "[288230376151711744]", "0", "0"), 0, MEGAMOE_EFORMAT, {"x.weight", "overflows"}},
    {ENTRY("U8", "[9223372036854775807,9223372036854775807,0]", "0", "0"),
     0,
     MEGAMOE_EFORMAT,
     {"x.weight", "overflows"}},
    /* unknown types do not escape the other checks: imp#1603 */
    {ENTRY("F9", "[8]", "0", "9"), 8, MEGAMOE_EFORMAT, {"x.weight", "past the end"}},
    {ENTRY("F9", "[-8]", "0", "8"), 8, MEGAMOE_EFORMAT, {"x.weight", "shape[0]"}},
    {ENTRY("F9", "[8]", "0", "8"), 8, MEGAMOE_EUNSUPPORTED, {"x.weight", "\"F9\""}},
    {ENTRY("u8", "[8]", "0", "8"), 8, MEGAMOE_EUNSUPPORTED, {"x.weight", "\"u8\""}},
    /* shape against offsets: fastllm#712 */
    {ENTRY("F32", "[32,8]", "0", "65536"),
     65536,
     MEGAMOE_EFORMAT,
     {"x.weight", "65536", "takes 1024"}},
    {ENTRY("F32", "[32,8]", "0", "8"), 8, MEGAMOE_EFORMAT, {"x.weight", "[32, 8]", "takes 1024"}},
    {ENTRY("U8", "[]", "0", "0"), 0, MEGAMOE_EFORMAT, {"x.weight", "takes 1"}},
    {ENTRY("F4", "[3]", "0", "2"), 2, MEGAMOE_EFORMAT, {"x.weight", "whole number of bytes"}},
    {ENTRY("F6_E2M3", "[2]", "0", "2"), 2, MEGAMOE_EFORMAT, {"x.weight", "whole number of bytes"}},
    {ENTRY("U8", "[1,1,1,1,1,1,1,1,1]", "0", "1"),
     1,
     MEGAMOE_EFORMAT,
     {"x.weight", "9 dimensions", "8"}},
    {ENTRY("U8", "[-1]", "0", "1"), 1, MEGAMOE_EFORMAT, {"x.weight", "shape[0]", "negative"}},
    {ENTRY("U8", "[1.0]", "0", "1"), 1, MEGAMOE_EFORMAT, {"x.weight", "shape[0]", "integer"}},
    {ENTRY("U8", "1", "0", "1"), 1, MEGAMOE_EFORMAT, {"x.weight", "shape must be an array"}},
    {ENTRY("U8", "null", "0", "1"), 1, MEGAMOE_EFORMAT, {"x.weight", "shape must be an array"}},
    /* tiling */
    {ENTRY("U8", "[4]", "0", "4"),
     8,
     MEGAMOE_EFORMAT,
     {"4 bytes follow the last tensor", "padded or appended"}},
    {ENTRY("U8", "[4]", "4", "8"), 8, MEGAMOE_EFORMAT, {"x.weight", "gap", "start of the data"}},
    {"{}", 8, MEGAMOE_EFORMAT, {"8 bytes follow the last tensor"}},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[5,9]}}",
     9,
     MEGAMOE_EFORMAT,
     {": b:", "gap", "behind a"}},
    {"{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     7,
     MEGAMOE_EFORMAT,
     {": b:", "overlap", "those of a"}},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     4,
     MEGAMOE_EFORMAT,
     {"overlap"}},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}",
     4,
     MEGAMOE_EFORMAT,
     {": b:", "overlap"}},
    /* names */
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
     8,
     MEGAMOE_EFORMAT,
     {"duplicate", "\"a\""}},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
     8,
     MEGAMOE_EFORMAT,
     {"duplicate"}},
    {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0,
     MEGAMOE_EFORMAT,
     {"header is not valid"}},
    {"{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0,
     MEGAMOE_EFORMAT,
     {"header is not valid", "0xff"}},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0,
     MEGAMOE_EFORMAT,
     {"duplicate"}},
    /* structure */
    {"{\"x\":[0,0]}", 0, MEGAMOE_EFORMAT, {": x:", "must be an object"}},
    {"{\"x\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, MEGAMOE_EFORMAT, {": x:", "data_offsets"}},
    {"{\"x\":{\"dtype\":8,\"shape\":[0],\"data_offsets\":[0,0]}}",
     0,
     MEGAMOE_EFORMAT,
     {": x:", "dtype must be a string"}},
    {"{\"x\":{\"shape\":[0],\"data_offsets\":[0,0]}}",
     0,
     MEGAMOE_EFORMAT,
     {": x:", "dtype must be a string"}},
    {"{\"__metadata__\":{\"format\":1}}",
     0,
     MEGAMOE_EFORMAT,
     {"__metadata__", "\"format\" must be a string"}},
    {"{\"__metadata__\":[]}", 0, MEGAMOE_EFORMAT, {"__metadata__ must be an object"}},
    {"{\"x\":", 0, MEGAMOE_EFORMAT, {"header is not valid"}},
    {"{} x", 0, MEGAMOE_EFORMAT, {"header is not valid"}},
    {"[]", 0, MEGAMOE_EFORMAT, {"must start with '{'"}},
    {" {}", 0, MEGAMOE_EFORMAT, {"must start with '{'"}},
    {"", 0, MEGAMOE_EFORMAT, {"must start with '{'"}},
};

T_CASE(malformed_headers_are_refused_with_the_reason) {
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const char *path = plain(refused[i].header, refused[i].data_bytes);
        if (!T_STATUS(open_tensors(path), refused[i].status))
            T_CHECK_MSG(false, "of header %s", refused[i].header);
        T_CONTAINS(megamoe_last_error(), "raw.safetensors");
        for (size_t p = 0; p < 3 && refused[i].parts[p]; p++)
            T_CONTAINS(megamoe_last_error(), refused[i].parts[p]);
    }
}

T_CASE(header_lengths_are_compared_with_the_file) {
    FAILS(open_tensors(raw(UINT64_MAX, "{}", 2, 0)), MEGAMOE_EFORMAT, "18446744073709551615",
          "only 2 bytes follow");
    FAILS(open_tensors(raw(UINT64_MAX - 7, "{}", 2, 0)), MEGAMOE_EFORMAT, "18446744073709551608");
    FAILS(open_tensors(raw(3, "{}", 2, 0)), MEGAMOE_EFORMAT, "length is 3", "only 2 bytes follow");
    FAILS(open_tensors(raw(1, "{}", 2, 0)), MEGAMOE_EFORMAT, "header is not valid");
    t_write_file(t_path("short.safetensors"), "\2\0\0\0\0\0\0", 7);
    FAILS(open_tensors(t_path("short.safetensors")), MEGAMOE_EFORMAT, "it has 7 bytes");
    t_write_file(t_path("empty.safetensors"), "", 0);
    FAILS(open_tensors(t_path("empty.safetensors")), MEGAMOE_EFORMAT, "it has 0 bytes");
}

T_CASE(headers_beyond_the_cap_are_refused) {
    const size_t bytes = 100000001;
    char *header = malloc(bytes);
    memset(header, ' ', bytes);
    header[0] = '{';
    header[1] = '}';
    FAILS(open_tensors(raw(bytes, header, bytes, 0)), MEGAMOE_EFORMAT, "100000001",
          "at most 100000000");
    T_OK(open_tensors(raw(bytes - 1, header, bytes - 1, 0)));
    free(header);
}

T_CASE(padding_with_nul_is_explained) {
    static const char header[] = "{}\0\0\0\0\0";
    FAILS(open_tensors(raw(8, header, 8, 0)), MEGAMOE_EFORMAT, "padded with 6 NUL bytes", "spaces");
    T_OK(open_tensors(plain("{}      ", 0)));
    T_OK(open_tensors(plain("{}\n", 0)));
}

T_CASE(deep_nesting_is_refused) {
    enum { DEPTH = 100000 };
    char *header = malloc(DEPTH + 6);
    memcpy(header, "{\"x\":", 5);
    memset(header + 5, '[', DEPTH);
    header[DEPTH + 5] = 0;
    FAILS(open_tensors(plain(header, 0)), MEGAMOE_EFORMAT, "header is not valid", "depth");
    free(header);
}

T_CASE(unusual_but_legal_files_are_read) {
    /* Scalars, tensors without elements in the middle, keys that are not known, any order. */
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"\":\"\"},"
        "\"last\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[5,9]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[4,4]},"
        "\"byte\":{\"dtype\":\"BOOL\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[4,5]},"
        "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4],\"later\":{}},"
        "\"packed\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[9,12]}}";
    megamoe_checkpoint *file;
    T_OK(megamoe_tensors_open(plain(header, 12), &file));
    megamoe_tensor tensor;
    T_OK(megamoe_checkpoint_tensor(file, "scalar", &tensor));
    T_EQ_STR(tensor.dtype, "F32");
    T_EQ_INT(tensor.rank, 0);
    T_EQ_INT((int64_t)tensor.bytes, 4);
    T_EQ_MEM(tensor.data, "\0\1\2\3", 4);
    T_OK(megamoe_checkpoint_tensor(file, "empty", &tensor));
    T_EQ_INT((int64_t)tensor.bytes, 0);
    T_EQ_INT(tensor.shape[1], 7);
    T_OK(megamoe_checkpoint_tensor(file, "byte", &tensor));
    T_EQ_INT(tensor.rank, 8);
    T_OK(megamoe_checkpoint_tensor(file, "last", &tensor));
    T_EQ_MEM(tensor.data, "\5\6\7\10", 4);
    T_OK(megamoe_checkpoint_tensor(file, "packed", &tensor));
    T_EQ_INT((int64_t)tensor.bytes, 3);
    FAILS(megamoe_checkpoint_tensor(file, "scala", &tensor), MEGAMOE_ENOTFOUND, "raw.safetensors",
          "scala");
    FAILS(megamoe_checkpoint_tensor(file, "scalar.", &tensor), MEGAMOE_ENOTFOUND, "scalar.");
    megamoe_checkpoint_close(file);
}

T_CASE(names_do_not_control_a_terminal) {
    FAILS(open_tensors(plain("{\"a\\u001b[2J\\nb\":{}}", 0)), MEGAMOE_EFORMAT, ": a?[2J?b: ");
}

T_CASE(a_file_opened_for_its_tensors_has_no_layers) {
    megamoe_checkpoint *file;
    T_OK(megamoe_tensors_open(plain("{}", 0), &file));
    T_EQ_INT(megamoe_checkpoint_layer(file, 0), -1);
    megamoe_weights *weights;
    megamoe_router *router;
    FAILS(megamoe_checkpoint_weights(file, 0, &weights), MEGAMOE_ENOTFOUND, "raw.safetensors");
    FAILS(megamoe_checkpoint_router(file, 0, &router), MEGAMOE_ENOTFOUND, "raw.safetensors");
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    T_OK(megamoe_checkpoint_describe(file, &info));
    T_EQ_STR(info.family, "");
    T_EQ_STR(info.model_type, "");
    T_EQ_INT((int64_t)info.files, 1);
    T_EQ_INT((int64_t)info.tensors, 0);
    T_EQ_INT((int64_t)info.bytes, 10);
    T_EQ_INT(info.layers, 0);
    megamoe_checkpoint_close(file);
    FAILS(open_tensors(t_path("absent.safetensors")), MEGAMOE_ENOTFOUND, "absent.safetensors");
    FAILS(open_tensors(t_path("")), MEGAMOE_EIO, "regular file");
    T_STATUS(megamoe_tensors_open(NULL, &file), MEGAMOE_EINVAL);
    T_STATUS(megamoe_checkpoint_open("x", NULL), MEGAMOE_EINVAL);
    megamoe_checkpoint_close(NULL);
}

T_CASE(every_truncation_of_a_file_is_refused) {
    built model = built_start();
    built_add(&model, "F32", SHAPE(3), "a");
    built_add(&model, "U8", SHAPE(5, 2), "b");
    const char *path = t_path("whole.safetensors");
    built_save(&model, path);
    built_free(&model);
    size_t bytes;
    uint8_t *whole = t_read_file(path, &bytes);
    T_OK(open_tensors(path));
    for (size_t n = 0; n < bytes; n++) {
        t_write_file(t_path("cut.safetensors"), whole, n);
        T_CHECK_MSG(open_tensors(t_path("cut.safetensors")) == MEGAMOE_EFORMAT,
                    "the first %zu of %zu bytes", n, bytes);
    }
    free(whole);
}

T_CASE(no_single_changed_byte_breaks_the_reader) {
    built model = built_start();
    built_add(&model, "F32", SHAPE(3), "a");
    built_add(&model, "U8", SHAPE(5, 2), "b");
    built_save(&model, t_path("whole.safetensors"));
    built_free(&model);
    size_t bytes;
    uint8_t *file = t_read_file(t_path("whole.safetensors"), &bytes);
    t_random random = t_random_start(1);
    for (size_t at = 0; at < bytes; at++) {
        const uint8_t before = file[at];
        file[at] = (uint8_t)(before ^ (1 + t_below(&random, 255)));
        t_write_file(t_path("changed.safetensors"), file, bytes);
        megamoe_checkpoint *opened_file = NULL;
        if (megamoe_tensors_open(t_path("changed.safetensors"), &opened_file) != MEGAMOE_OK)
            T_CONTAINS(megamoe_last_error(), "changed.safetensors");
        megamoe_checkpoint_close(opened_file);
        file[at] = before;
    }
    free(file);
}
