/*
 * What config.json and hf_quant_config.json declare about quantization: a format, whether activations are FP4
 * too, and which modules are left alone. Declarations decide nothing; they are compared with the tensors.
 *
 * hf_quant_config.json is the quantizer's own and wins over config.json's quantization_config, which
 * converters often keep from the model they started with.
 */
#ifndef MM_CHECKPOINT_QUANTIZATION_H
#define MM_CHECKPOINT_QUANTIZATION_H

#include "checkpoint/anomalies.h"
#include "checkpoint/config.h"
#include "weights.h"

typedef struct mm_ignore mm_ignore; /* one entry of an ignore list */

typedef struct mm_quantization {
    mm_format experts; /* 0: nothing declared */
    bool nvfp4_activations;
    const char *file;     /* where it is declared: "config.json" or "hf_quant_config.json" */
    json_t *root;         /* hf_quant_config.json, or NULL */
    const json_t *listed; /* quantized_layers: only these modules are quantized; or NULL */
    mm_ignore *ignored;
    uint32_t ignored_count;
} mm_quantization;

megamoe_status mm_quantization_read(const char *directory, const mm_config *config, mm_anomalies *anomalies,
                                    mm_quantization *declared);
void mm_quantization_free(mm_quantization *declared);

/*
 * Is the module ("model.layers.3.mlp.experts.0.gate_proj") left alone? Entries are names of modules (and so
 * of all they contain), wildcards with *, or "re:" and a regular expression that must match from the
 * beginning. stem_length: of what stands before "layers."; other models spell it differently in their lists.
 */
bool mm_quantization_ignores(const mm_quantization *declared, const char *module, size_t stem_length);

/* The format declared for a module of routed experts; 0: left alone, or nothing declared. */
mm_format mm_quantization_format(const mm_quantization *declared, const char *module, size_t stem_length);

#endif
