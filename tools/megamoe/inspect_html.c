/* The inspection as one page: no script, no file beside it, readable in light and dark. */
#include <stdlib.h>

#include "inspect.h"
#include "shards.h"

static const char style[] =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem .3rem 0;text-align:left;"
    "border-bottom:1px solid #8884;vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "td{overflow-wrap:anywhere}.error{color:#c33;font-weight:600}.warning{color:#b70;font-weight:600}"
    ".bar{background:#48a;height:.7rem;border-radius:2px}";

/* Names come from files that strangers made. */
static void put_escaped(FILE *page, const char *text) {
    for (; text && *text; text++) switch (*text) {
        case '<': fputs("&lt;", page); break;
        case '>': fputs("&gt;", page); break;
        case '&': fputs("&amp;", page); break;
        case '"': fputs("&quot;", page); break;
        default: fputc(*text, page);
        }
}

static void put_layers(FILE *page, const cli_inspection *inspection) {
    fputs(
        "<h2>Layers</h2><table><tr><th>layers<th class=n>experts<th class=n>per token<th class=n>hidden<th class=n>intermediate<th>format<th>naming"
        "<th>router<th>shared expert<th>clamp<th class=n>bytes of one layer</tr>\n",
        page);
    for (uint32_t i = 0; i < inspection->range_count; i++) {
        const cli_layer_range *range = &inspection->ranges[i];
        const megamoe_layer_info *info = &range->info;
        char bytes[16], *router = cli_router_text(info);
        fprintf(page, range->count > 1 ? "<tr><td>%u-%u" : "<tr><td>%u", range->first, range->last);
        fprintf(page, "<td class=n>%u", info->experts_present);
        if (info->experts_present != info->shape.expert_count) fprintf(page, " of %u", info->shape.expert_count);
        fprintf(page, "<td class=n>%u<td class=n>%u<td class=n>%u<td>%s<td>%s<td>%s<td>%s<td>",
                info->shape.experts_per_token, info->shape.hidden, info->shape.intermediate, info->format, info->naming,
                router, info->shared_format ? info->shared_format : "none");
        if (info->shape.swiglu_limit > 0)
            fprintf(page, "%g", (double)info->shape.swiglu_limit);
        else
            fputs("none", page);
        fprintf(page, "<td class=n>%s</tr>\n", cli_bytes_text((double)cli_layer_bytes(info), bytes));
        free(router);
    }
    fputs("</table>\n", page);
}

static void put_ranks(FILE *page, const cli_inspection *inspection) {
    double most = (double)cli_rank_bytes(inspection, 1);
    fputs("<h2>Memory per rank</h2><table><tr><th class=n>ranks<th class=n>each holds<th></tr>\n", page);
    for (uint32_t ranks = 1; ranks <= 64; ranks *= 2) {
        char text[16];
        double bytes = (double)cli_rank_bytes(inspection, ranks);
        fprintf(page, "<tr><td class=n>%u<td class=n>%s<td><div class=bar style=\"width:%.1frem\"></div></tr>\n", ranks,
                cli_bytes_text(bytes, text), most > 0 ? 25 * bytes / most : 0);
    }
    fputs("</table>\n", page);
}

static void put_anomalies(FILE *page, const cli_inspection *inspection) {
    uint32_t count = megamoe_checkpoint_anomaly_count(inspection->checkpoint);
    fprintf(page, "<h2>Anomalies</h2>\n%s",
            count ? "<table><tr><th>severity<th>kind<th>what<th>remedy</tr>\n" : "<p>None.</p>\n");
    for (uint32_t i = 0; i < count; i++) {
        megamoe_anomaly a = {.struct_size = sizeof a};
        if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &a) != MEGAMOE_OK) continue;
        const char *severity = a.is_error ? "error" : "warning";
        fprintf(page, "<tr><td class=%s>%s<td>", severity, severity);
        put_escaped(page, a.kind);
        fputs("<td>", page);
        put_escaped(page, a.detail);
        fputs("<td>", page);
        put_escaped(page, a.remedy);
        fputs("</tr>\n", page);
    }
    if (count) fputs("</table>\n", page);
}

int cli_inspect_html(const cli_inspection *inspection, const char *path) {
    char *text = NULL, bytes[16];
    size_t length = 0;
    FILE *page = open_memstream(&text, &length);
    if (!page) return cli_fail("there is no memory for the page %s.", path);
    fprintf(page,
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">"
            "<title>megamoe inspect</title><style>%s</style>\n<h1>",
            style);
    put_escaped(page, inspection->path);
    fputs("</h1>\n<p>", page);
    put_escaped(page, megamoe_checkpoint_model_type(inspection->checkpoint));
    fprintf(page, ", %u MoE layers, %s, by megamoe %s</p>\n", inspection->layer_count,
            cli_bytes_text((double)inspection->bytes, bytes), megamoe_version());
    put_layers(page, inspection);
    put_ranks(page, inspection);
    put_anomalies(page, inspection);
    fputs("</html>\n", page);
    fclose(page);
    int result = cli_write_file(path, text);
    free(text);
    return result;
}
