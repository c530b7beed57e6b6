/* placeholder */
#include "cli.h"
static int run(const cli_options *options) {
    (void)options;
    return cli_fail("not yet");
}
const cli_command cli_quantize = {.name = "quantize",
                                  .words = "IN OUT",
                                  .summary = "BF16, FP8 or MXFP4 experts to NVFP4",
                                  .details = "",
                                  .examples = "",
                                  .options = "scale separate calibration strict",
                                  .words_min = 2,
                                  .words_max = 2,
                                  .run = run};
