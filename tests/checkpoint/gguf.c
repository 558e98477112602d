/* SPDX-License-Identifier: Apache-2.0 */
/* The GGUF reader: what it gives of good files and says of bad ones. */
#define _GNU_SOURCE
#include "checkpoint/gguf.h"

#include <stdlib.h>
#include <string.h>

#include "gguf_fixture.h"

static megamoe_status parse(const void *data, size_t n) {
    mm_tensor_file file;
    json_t *metadata;
    /* Exactly as long, so that a sanitizer sees a byte too many. */
    uint8_t *copy = malloc(n ? n : 1);
    memcpy(copy, data, n);
    const megamoe_status status = mm_gguf_parse("file", copy, n, &file, &metadata);
    T_CHECK((metadata != NULL) == (status == MEGAMOE_OK));
    mm_tensor_file_close(&file);
    json_decref(metadata);
    free(copy);
    return status;
}

/* Two tensors of 6 and 64 values, the second in blocks. */
static gguf plain(void) {
    gguf file = gguf_start();
    gguf_text(&file, "general.architecture", "gpt-oss");
    gguf_randomize(&file, gguf_add(&file, GGUF_F32, SHAPE(2, 3), "small"));
    gguf_randomize(&file, gguf_add(&file, GGUF_MXFP4, SHAPE(1, 2, 32), "blocks"));
    return file;
}

T_CASE(tensors_are_given_with_shapes_turned_around) {
    gguf file = plain();
    buffer all = gguf_bytes(&file);
    mm_tensor_file read;
    json_t *metadata;
    T_OK(mm_gguf_parse("dir/file.gguf", all.data, all.n, &read, &metadata));
    T_EQ_INT((int64_t)read.n, 2);
    T_EQ_STR(mm_tensor_file_name(&read), "file.gguf");
    const mm_tensor *small = &read.tensors[0], *blocks = &read.tensors[1];
    T_EQ_STR(small->name, "small");
    T_EQ_STR(small->dtype->name, "F32");
    T_EQ_INT(small->rank, 2);
    T_EQ_INT(small->shape[0], 2);
    T_EQ_INT(small->shape[1], 3);
    T_EQ_INT((int64_t)small->bytes, 24);
    T_EQ_MEM(all.data + small->offset, file.tensors[0].data, 24);
    T_EQ_STR(blocks->name, "blocks");
    T_CHECK(blocks->dtype == mm_gguf_mxfp4);
    T_EQ_INT(blocks->rank, 3);
    T_EQ_INT(blocks->shape[2], 32);
    T_EQ_INT((int64_t)blocks->bytes, 34);
    T_EQ_MEM(all.data + blocks->offset, file.tensors[1].data, 34);
    T_EQ_INT(blocks->offset % 32, 0);
    mm_tensor_file_close(&read);
    json_decref(metadata);
    free(all.data);
    gguf_free(&file);
}

T_CASE(values_of_every_type_are_read) {
    gguf file = gguf_start();
    gguf_value(&file, "u8", VALUE_U8, "\xFF", 1);
    gguf_value(&file, "i8", VALUE_I8, "\xFF", 1);
    gguf_value(&file, "u16", VALUE_U16, "\xFE\xFF", 2);
    gguf_value(&file, "i16", VALUE_I16, "\xFE\xFF", 2);
    gguf_value(&file, "u32", VALUE_U32, "\xFD\xFF\xFF\xFF", 4);
    gguf_value(&file, "i32", VALUE_I32, "\xFD\xFF\xFF\xFF", 4);
    gguf_value(&file, "i64", VALUE_I64, "\xFC\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8);
    gguf_value(&file, "u64", VALUE_U64, "\xFC\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8);
    gguf_value(&file, "f32", VALUE_F32, &(float){1.5f}, 4);
    gguf_value(&file, "f64", VALUE_F64, &(double){-2.25}, 8);
    gguf_bool(&file, "yes", true);
    gguf_bool(&file, "no", false);
    gguf_text(&file, "general.architecture", "deepseek4");
    gguf_text(&file, "tokenizer.chat_template", "\xFF is no UTF-8");
    gguf_f32s(&file, "list", (const float[]){0.0f, 10.0f}, 2);
    static const float long_list[MM_GGUF_LIST_KEPT + 1];
    gguf_f32s(&file, "long", long_list, MM_GGUF_LIST_KEPT + 1);
    gguf_value(&file, "strings", VALUE_ARRAY,
               "\x08\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0a\0\0\0\0\0\0\0\0", 29);
    gguf_value(&file, "infinite", VALUE_F32, "\0\0\x80\x7F", 4);
    buffer all = gguf_bytes(&file);
    mm_tensor_file read;
    json_t *m;
    T_OK(mm_gguf_parse("file", all.data, all.n, &read, &m));
    T_EQ_INT(json_integer_value(json_object_get(m, "u8")), 255);
    T_EQ_INT(json_integer_value(json_object_get(m, "i8")), -1);
    T_EQ_INT(json_integer_value(json_object_get(m, "u16")), 65534);
    T_EQ_INT(json_integer_value(json_object_get(m, "i16")), -2);
    T_EQ_INT(json_integer_value(json_object_get(m, "u32")), 4294967293);
    T_EQ_INT(json_integer_value(json_object_get(m, "i32")), -3);
    T_EQ_INT(json_integer_value(json_object_get(m, "i64")), -4);
    T_CHECK(json_is_real(json_object_get(m, "u64"))); /* what no signed 64 bits hold */
    T_EQ_F64(json_real_value(json_object_get(m, "f32")), 1.5);
    T_EQ_F64(json_real_value(json_object_get(m, "f64")), -2.25);
    T_CHECK(json_is_true(json_object_get(m, "yes")));
    T_CHECK(json_is_false(json_object_get(m, "no")));
    T_EQ_STR(json_string_value(json_object_get(m, "general.architecture")), "deepseek4");
    T_EQ_F64(json_real_value(json_array_get(json_object_get(m, "list"), 1)), 10);
    T_CHECK(json_is_null(json_object_get(m, "tokenizer.chat_template")));
    T_CHECK(json_is_null(json_object_get(m, "long")));
    T_CHECK(json_is_null(json_object_get(m, "strings")));
    T_CHECK(!json_is_number(json_object_get(m, "infinite")));
    mm_tensor_file_close(&read);
    json_decref(m);
    free(all.data);
    gguf_free(&file);
}

T_CASE(alignments_are_powers_of_two) {
    for (uint32_t alignment = 0; alignment <= 128; alignment++) {
        gguf file = plain();
        const bool legal = alignment && (alignment & (alignment - 1)) == 0;
        gguf_u32(&file, "general.alignment", alignment);
        file.alignment = legal ? alignment : 32;
        buffer all = gguf_bytes(&file);
        if (legal)
            T_OK(parse(all.data, all.n));
        else
            FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, "general.alignment", "power of two");
        free(all.data);
        gguf_free(&file);
    }
    gguf file = plain();
    gguf_value(&file, "general.alignment", VALUE_U64, &(uint64_t){32}, 8);
    buffer all = gguf_bytes(&file);
    FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, "general.alignment", "32-bit");
    free(all.data);
    gguf_free(&file);
}

/* Only the padding behind the last tensor may be missing. */
T_CASE(a_file_cut_anywhere_is_refused) {
    gguf file = plain();
    buffer all = gguf_bytes(&file);
    const size_t padding = 32 - 34 % 32;
    for (size_t n = 0; n <= all.n; n++)
        if (n < all.n - padding)
            T_CHECK_MSG(parse(all.data, n) == MEGAMOE_EFORMAT, "%zu of %zu bytes", n, all.n);
        else
            T_OK(parse(all.data, n));
    all.data = realloc(all.data, all.n + 1);
    all.data[all.n] = 0;
    FAILS(parse(all.data, all.n + 1), MEGAMOE_EFORMAT, "bytes follow the last tensor");
    free(all.data);
    gguf_free(&file);
}

/* Where the bytes behind a text begin. */
static uint8_t *behind(const buffer *all, const char *text) {
    uint8_t *found = memmem(all->data, all->n, text, strlen(text));
    T_REQUIRE(found != NULL);
    return found + strlen(text);
}

T_CASE(damaged_headers_are_refused) {
    /* `n` bytes of `patch` at `offset` behind the text (before it where negative). */
    static const struct {
        const char *text;
        int offset;
        const char *patch;
        size_t n;
        megamoe_status status;
        const char *part;
    } damages[] = {
        {"GGUF", -4, "GGUE", 4, MEGAMOE_EFORMAT, "starts with"},
        {"GGUF", 0, "\1", 1, MEGAMOE_EUNSUPPORTED, "version 1;"},
        {"GGUF", 0, "\2", 1, MEGAMOE_EUNSUPPORTED, "version 2;"},
        {"GGUF", 0, "\4", 1, MEGAMOE_EUNSUPPORTED, "version 4;"},
        {"GGUF", 0, "\0\0\0\3", 4, MEGAMOE_EUNSUPPORTED, "high bytes first"},
        {"GGUF", 4, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, MEGAMOE_EFORMAT, "announces"},
        {"GGUF", 12, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, MEGAMOE_EFORMAT, "announces"},
        {"GGUF", 12, "\2", 1, MEGAMOE_EFORMAT, ""}, /* a tensor's entry as a key */
        {"general.architecture", -28, "\0", 1, MEGAMOE_EFORMAT, "empty"},
        {"general.architecture", -28, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, MEGAMOE_EFORMAT,
         "key 0"},
        {"general.architecture", -20, "\0", 1, MEGAMOE_EFORMAT, "key 0: its name must be"},
        {"general.architecture", 0, "\15", 1, MEGAMOE_EFORMAT, "type 13"},
        {"general.architecture", 0, "\xFF\xFF\xFF\xFF", 4, MEGAMOE_EFORMAT, "type 4294967295"},
        {"general.architecture", 4, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F", 8, MEGAMOE_EFORMAT,
         "the file ends"},
        {"small", -5, "\n", 1, MEGAMOE_EFORMAT, "tensor 0: its name must be"},
        {"small", -13, "\0", 1, MEGAMOE_EFORMAT, "tensor 0: its name must be"},
        {"small", 0, "\5", 1, MEGAMOE_EFORMAT, "small: it has 5 dimensions"},
        {"small", 11, "\x80", 1, MEGAMOE_EFORMAT, "small: dimension 0 is negative"},
        {"small", 4, "\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0", 16, MEGAMOE_EFORMAT, "overflows"},
        {"small", 4, "\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1", 16, MEGAMOE_EFORMAT, "overflows"},
        {"small", 4, "\x08", 1, MEGAMOE_EFORMAT, "blocks: its offset is 32"},
        {"small", 20, "\4", 1, MEGAMOE_EUNSUPPORTED, "small: its type is 4"},
        {"small", 20, "\44", 1, MEGAMOE_EUNSUPPORTED, "small: its type is 36"},
        {"small", 20, "\x63", 1, MEGAMOE_EUNSUPPORTED, "small: its type is 99"},
        {"small", 24, "\40", 1, MEGAMOE_EFORMAT, "small: its offset is 32"},
        {"blocks", 4, "\37", 1, MEGAMOE_EFORMAT, "blocks: a row of its shape [1, 2, 31]"},
        {"blocks", 12, "\xFF\xFF\xFF", 3, MEGAMOE_EFORMAT, "past the end"},
        {"blocks", 28, "\50", 1, MEGAMOE_EFORMAT, "NVFP4 comes in blocks of 64"},
        {"blocks", 32, "\0", 1, MEGAMOE_EFORMAT, "blocks: its offset is 0;"},
        {"blocks", 32, "\41", 1, MEGAMOE_EFORMAT, "must be 32"},
        {"blocks", 32, "\x60", 1, MEGAMOE_EFORMAT, "must be 32"},
        {"blocks", 32, "\xE0\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, MEGAMOE_EFORMAT, "must be 32"},
    };
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        gguf file = plain();
        buffer all = gguf_bytes(&file);
        memcpy(behind(&all, damages[i].text) + damages[i].offset, damages[i].patch, damages[i].n);
        if (!T_STATUS(parse(all.data, all.n), damages[i].status) ||
            !T_CONTAINS(megamoe_last_error(), damages[i].part))
            T_CHECK_MSG(false, "damage %zu", i);
        free(all.data);
        gguf_free(&file);
    }
}

T_CASE(bad_keys_and_names_are_refused) {
    static const struct {
        uint32_t type;
        const char *value;
        size_t n;
        const char *part;
    } values[] = {
        {VALUE_ARRAY, "\x09\0\0\0\1\0\0\0\0\0\0\0", 12, "no arrays"},
        {VALUE_ARRAY, "\x0D\0\0\0\1\0\0\0\0\0\0\0", 12, "type 13"},
        {VALUE_ARRAY, "\x06\0\0\0\1\0\0\0\0\0\0\x40", 12, "exceeds the file"},
        {VALUE_ARRAY, "\x06\0\0\0\0\0\0\1\0\0\0\0", 12, "the file ends"},
        {VALUE_ARRAY, "\x08\0\0\0\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 12, "the file ends"},
        {VALUE_STRING, "\xF8\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, "the file ends"},
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        gguf file = gguf_start();
        gguf_value(&file, "a.key", values[i].type, values[i].value, values[i].n);
        buffer all = gguf_bytes(&file);
        FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, values[i].part);
        free(all.data);
        gguf_free(&file);
    }
    gguf file = gguf_start();
    gguf_u32(&file, "twice", 1);
    gguf_text(&file, "twice", "2");
    buffer all = gguf_bytes(&file);
    FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, "twice", "key stands there twice");
    free(all.data);
    gguf_free(&file);

    for (int length = 63; length <= 64; length++) {
        file = gguf_start();
        gguf_add(&file, GGUF_F32, SHAPE(1), "%0*d", length, 0);
        all = gguf_bytes(&file);
        if (length == 63)
            T_OK(parse(all.data, all.n));
        else
            FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, "has 64 bytes");
        free(all.data);
        gguf_free(&file);
    }

    file = gguf_start();
    gguf_text(&file, "general.architecture", "gpt-oss");
    gguf_add(&file, GGUF_F32, SHAPE(1), "same");
    gguf_add(&file, GGUF_F32, SHAPE(2), "same");
    gguf_save(&file, "same.gguf");
    FAILS(try_open(t_path("same.gguf")), MEGAMOE_EFORMAT, "same.gguf", "same",
          "two tensors have this name");
    gguf_free(&file);
}

T_CASE(scalars_and_empty_tensors_are_legal) {
    gguf file = gguf_start();
    gguf_add(&file, GGUF_F32, SCALAR, "scalar");
    gguf_add(&file, GGUF_MXFP4, SHAPE(3, 0), "empty");
    gguf_add(&file, GGUF_F32, SHAPE(1), "last");
    buffer all = gguf_bytes(&file);
    T_OK(parse(all.data, all.n));
    free(all.data);
    gguf_free(&file);
    file = gguf_start();
    all = gguf_bytes(&file);
    T_OK(parse(all.data, all.n));
    free(all.data);
    gguf_free(&file);
}

/* By its own calls too, without a family. */
T_CASE(tensors_of_a_file_are_found_by_name) {
    gguf file = plain();
    gguf_save(&file, "plain.gguf");
    megamoe_checkpoint *checkpoint = NULL;
    T_OK(megamoe_tensors_open(t_path("plain.gguf"), &checkpoint));
    megamoe_tensor tensor;
    T_OK(megamoe_checkpoint_tensor(checkpoint, "blocks", &tensor));
    T_EQ_STR(tensor.dtype, "MXFP4");
    T_EQ_MEM(tensor.data, file.tensors[1].data, file.tensors[1].bytes);
    T_STATUS(megamoe_checkpoint_tensor(checkpoint, "block", &tensor), MEGAMOE_ENOTFOUND);
    megamoe_checkpoint_close(checkpoint);
    FAILS(try_open(t_path("plain.gguf")), MEGAMOE_EUNSUPPORTED, "plain.gguf", "no expert tensors");
    gguf_free(&file);
}

/* Of a header that is longer than what is read at a time. */
T_CASE(a_long_header_is_read_in_parts) {
    gguf file = plain();
    for (int i = 0; i < 200; i++) {
        char key[32];
        snprintf(key, sizeof key, "list.%d", i);
        static float numbers[MM_GGUF_LIST_KEPT + 1];
        numbers[0] = (float)i;
        gguf_f32s(&file, key, numbers, (size_t)(i * 41 % (MM_GGUF_LIST_KEPT + 2)));
        static char text[40000];
        memset(text, 'x', (size_t)i * 199);
        text[i * 199] = 0;
        snprintf(key, sizeof key, "text.%d", i);
        gguf_text(&file, key, text);
    }
    buffer all = gguf_bytes(&file);
    mm_tensor_file parsed, read;
    json_t *a, *b;
    T_OK(mm_gguf_parse("file", all.data, all.n, &parsed, &a));
    T_OK(mm_gguf_open(gguf_save(&file, "long.gguf"), &read, &b));
    T_EQ_INT((int64_t)json_object_size(b), 401);
    T_CHECK(json_equal(a, b));
    T_REQUIRE(T_EQ_INT((int64_t)read.n, 2));
    for (int i = 0; i < 2; i++) {
        uint8_t bytes[64];
        T_EQ_STR(read.tensors[i].name, parsed.tensors[i].name);
        T_CHECK(read.tensors[i].offset == parsed.tensors[i].offset);
        T_OK(mm_tensor_read(&read.tensors[i], 0, bytes, read.tensors[i].bytes));
        T_EQ_MEM(bytes, file.tensors[i].data, read.tensors[i].bytes);
    }
    mm_tensor_file_close(&parsed);
    mm_tensor_file_close(&read);
    json_decref(a);
    json_decref(b);
    free(all.data);
    gguf_free(&file);
}

T_CASE(keys_may_not_be_longer_than_the_format_has_them) {
    static char key[MM_GGUF_KEY_MAX + 2];
    memset(key, 'k', sizeof key - 1);
    gguf file = plain();
    gguf_text(&file, key + 1, "value");
    buffer all = gguf_bytes(&file);
    T_OK(parse(all.data, all.n));
    free(all.data);
    gguf_text(&file, key, "value");
    all = gguf_bytes(&file);
    FAILS(parse(all.data, all.n), MEGAMOE_EFORMAT, "key 2", "65536 bytes", "65535");
    free(all.data);
    gguf_free(&file);
}
