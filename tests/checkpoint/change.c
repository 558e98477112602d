/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are cut or written to while they are open: errors that name them, never a signal. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf_fixture.h"

static const sizes size = {.hidden = 128, .intermediate = 64, .experts = 5};
static const char config[] =
    "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":2,\"n_routed_experts\":5,"
    "\"routed_scaling_factor\":2.5,\"n_group\":1}";

typedef struct use {
    const char *file;
    megamoe_checkpoint *checkpoint;
    megamoe_weights *weights;
    int64_t bytes;
} use;

/* NVFP4 experts of layer 3, the last of which end the file, and their router. */
static use use_open(void) {
    built model = built_start();
    built_add(&model, "F32", SHAPE(5), "model.layers.3.mlp.gate.e_score_correction_bias");
    built_add(&model, "BF16", SHAPE(5, 128), "model.layers.3.mlp.gate.weight");
    add_nvfp4(&model, "model.layers.%d.mlp.", 3, named, size);
    use u = {.checkpoint = opened(save_model(&model, config))};
    built_free(&model);
    u.file = t_path("model/model.safetensors");
    struct stat st;
    T_REQUIRE(stat(u.file, &st) == 0);
    u.bytes = st.st_size;
    T_OK(megamoe_checkpoint_weights(u.checkpoint, 3, &u.weights));
    return u;
}

static void use_close(use *u) {
    megamoe_weights_close(u->weights);
    megamoe_checkpoint_close(u->checkpoint);
}

static void missed(megamoe_status status, const use *u) {
    T_STATUS(status, MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), u->file);
    T_CONTAINS(megamoe_last_error(), "too early");
}

static int files_in(const char *directory) {
    DIR *stream = opendir(directory);
    T_REQUIRE(stream != NULL);
    int n = 0;
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(stream);
    return n;
}

T_CASE(a_file_is_cut_after_its_weights_were_taken) {
    use u = use_open();
    const char *out = t_path("out");
    T_REQUIRE(mkdir(out, 0777) == 0);
    T_REQUIRE(truncate(u.file, u.bytes - 1) == 0);
    static double values[128 * 64];
    T_OK(megamoe_weights_unpack(u.weights, 0, MEGAMOE_GATE, values));
    for (int32_t threads = 1; threads <= 3; threads++)
        for (int cuda = 0; cuda < 2; cuda++) {
            megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
            options.threads = threads;
            options.device = cuda ? "cuda" : "cpu";
            missed(megamoe_weights_prepare(u.weights, NULL, &options, t_path("out/layer")), &u);
            T_EQ_INT(files_in(out), 0);
        }
    megamoe_weights_report report = MEGAMOE_INIT(megamoe_weights_report);
    missed(megamoe_weights_analyze(u.weights, 2, (megamoe_progress){0}, &report), &u);
    megamoe_matrix matrix;
    missed(megamoe_weights_matrix(u.weights, 4, MEGAMOE_UP, &matrix), &u);
    T_OK(megamoe_weights_matrix(u.weights, 3, MEGAMOE_UP, &matrix));
    /* To nothing: all is missed but what was kept. */
    T_REQUIRE(truncate(u.file, 0) == 0);
    missed(megamoe_weights_unpack(u.weights, 0, MEGAMOE_GATE, values), &u);
    T_OK(megamoe_weights_unpack(u.weights, 3, MEGAMOE_DOWN, values));
    megamoe_weights *again;
    missed(megamoe_checkpoint_weights(u.checkpoint, 3, &again), &u);
    megamoe_router *router;
    missed(megamoe_checkpoint_router(u.checkpoint, 3, &router), &u);
    megamoe_tensor tensor;
    missed(megamoe_checkpoint_tensor(u.checkpoint, "model.layers.3.mlp.gate.weight", &tensor), &u);
    use_close(&u);
}

T_CASE(a_tensor_that_was_read_outlives_its_file) {
    use u = use_open();
    megamoe_tensor first, again;
    T_OK(megamoe_checkpoint_tensor(u.checkpoint, "model.layers.3.mlp.gate.weight", &first));
    T_REQUIRE(truncate(u.file, 0) == 0);
    T_OK(megamoe_checkpoint_tensor(u.checkpoint, "model.layers.3.mlp.gate.weight", &again));
    T_CHECK(first.data == again.data);
    use_close(&u);
}

T_CASE(scales_that_become_wrong_are_found_when_they_are_used) {
    use u = use_open();
    const int fd = open(u.file, O_RDWR);
    T_REQUIRE(fd >= 0);
    static char bytes[1 << 20];
    memset(bytes, 0xFF, sizeof bytes); /* NaN as a scale; any code is one */
    T_REQUIRE(pwrite(fd, bytes, (size_t)u.bytes - 8000, 8000) == u.bytes - 8000);
    close(fd);
    T_STATUS(megamoe_weights_prepare(u.weights, NULL, NULL, t_path("layer")), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), u.file);
    T_CONTAINS(megamoe_last_error(), "NaN");
    T_CHECK(access(t_path("layer"), F_OK) != 0);
    use_close(&u);
}

/* In blocks, which are unpacked when they are read. */
T_CASE(a_gguf_file_is_cut_after_its_weights_were_taken) {
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
        const gguf_layer layer = {
            .type = nvfp4 ? GGUF_NVFP4 : GGUF_MXFP4, .s = size, .bias = true, .scale = nvfp4};
        gguf file = gguf_start();
        gguf_text(&file, "general.architecture", "gpt-oss");
        gguf_add_experts(&file, &layer);
        use u = {.file = gguf_save(&file, "cut.gguf")};
        gguf_free(&file);
        u.checkpoint = opened(u.file);
        T_OK(megamoe_checkpoint_weights(u.checkpoint, 0, &u.weights));
        megamoe_matrix matrix;
        T_OK(megamoe_weights_matrix(u.weights, 2, MEGAMOE_UP, &matrix));
        const uint8_t first = *(const uint8_t *)matrix.codes;
        T_REQUIRE(truncate(u.file, 5000) == 0);
        T_CHECK(*(const uint8_t *)matrix.codes == first);
        missed(megamoe_weights_matrix(u.weights, 4, MEGAMOE_DOWN, &matrix), &u);
        for (int32_t threads = 1; threads <= 2; threads++) {
            megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
            options.threads = threads;
            missed(megamoe_weights_prepare(u.weights, NULL, &options, t_path("layer")), &u);
            T_CHECK(access(t_path("layer"), F_OK) != 0);
        }
        megamoe_weights *again;
        missed(megamoe_checkpoint_weights(u.checkpoint, 0, &again), &u);
        T_REQUIRE(truncate(u.file, 100) == 0);
        T_STATUS(try_open(u.file), MEGAMOE_EFORMAT);
        use_close(&u);
    }
}

T_CASE(a_file_is_cut_before_it_is_quantized) {
    built model = built_start();
    for (int32_t e = 0; e < size.experts; e++)
        for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
            const bool down = p == MEGAMOE_DOWN;
            built_add(&model, "BF16",
                      SHAPE(down ? size.hidden : size.intermediate,
                            down ? size.intermediate : size.hidden),
                      "model.layers.3.mlp.experts.%d.%s.weight", e, named[p]);
        }
    use u = {.checkpoint = opened(save_model(&model, config))};
    built_free(&model);
    u.file = t_path("model/model.safetensors");
    T_REQUIRE(truncate(u.file, 50000) == 0);
    for (int32_t threads = 1; threads <= 3; threads++)
        for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
            megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
            options.format = nvfp4 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4;
            options.threads = threads;
            missed(megamoe_checkpoint_quantize(u.checkpoint, 3, &options, &u.weights), &u);
            T_CHECK(u.weights == NULL);
        }
    use_close(&u);
}

typedef struct cutting {
    const char *file;
    int64_t bytes;
} cutting;

static void cut(void *user, uint64_t done, uint64_t total) {
    (void)done;
    (void)total;
    const cutting *c = user;
    T_REQUIRE(truncate(c->file, c->bytes) == 0);
}

/* Before it begins, and when its first tensor is written. */
T_CASE(a_file_is_cut_while_it_is_converted) {
    for (int begun = 0; begun < 2; begun++) {
        use u = use_open();
        cutting half = {u.file, u.bytes / 2};
        T_REQUIRE(mkdir(t_path(begun ? "begun" : "early"), 0777) == 0);
        if (!begun)
            T_REQUIRE(truncate(u.file, u.bytes / 2) == 0);
        megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
        options.family = "modelopt-nvfp4";
        options.progress = (megamoe_progress){cut, &half};
        missed(megamoe_checkpoint_convert(u.checkpoint, &options,
                                          t_path(begun ? "begun/new" : "early/new")),
               &u);
        T_EQ_INT(files_in(t_path(begun ? "begun" : "early")), 0);
        use_close(&u);
    }
}
