/* The inspection as one page: no script, no file beside it, readable in light and dark. */
#include <stdlib.h>
#include <string.h>

#include "inspect.h"
#include "shards.h"

static const char style[] =
    ":root{color-scheme:light dark;--ink:#1b2430;--soft:#5c6b7a;--line:#e3e8ee;--card:#fff;--page:#f4f6f9;"
    "--bar:#3b78e0;--error:#c22f3c;--warning:#a35f00}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6ebf1;--soft:#93a1b0;--line:#2c3642;--card:#1a212a;"
    "--page:#11161c;--bar:#5b93f0;--error:#ff7b85;--warning:#f0b252}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:74rem;"
    "margin:2.5rem auto;padding:0 1.25rem}"
    "h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:0 0 .75rem}"
    "p{margin:.2rem 0;color:var(--soft)}"
    ".tiles{display:flex;flex-wrap:wrap;gap:.75rem;margin:1.5rem 0}"
    ".tile,section{background:var(--card);border:1px solid var(--line);border-radius:10px}"
    ".tile{padding:.7rem 1.1rem;flex:1 1 8rem}.tile b{display:block;font-size:1.35rem;line-height:1.3}"
    ".tile span{color:var(--soft);font-size:.85rem}"
    "section{padding:1rem 1.25rem;margin:1rem 0;overflow-x:auto}"
    "table{border-collapse:collapse;width:100%}"
    "th{font-size:.8rem;font-weight:600;color:var(--soft);text-align:left;white-space:nowrap}"
    "th,td{padding:.4rem 1.1rem .4rem 0;border-bottom:1px solid var(--line);vertical-align:top}"
    "tr:last-child td{border-bottom:0}th:last-child,td:last-child{padding-right:0}"
    ".n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.k{white-space:nowrap}"
    ".long{overflow-wrap:anywhere;min-width:14rem}.all{width:100%}"
    ".badge{border:1px solid;border-radius:99px;padding:.05rem .55rem;font-size:.8rem;font-weight:600;white-space:nowrap}"
    ".error{color:var(--error)}.warning{color:var(--warning)}"
    ".bar{background:var(--bar);height:.8rem;border-radius:3px;margin-top:.35rem;min-width:2px}";

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

static void put_tile(FILE *page, const char *class, const char *value, const char *label) {
    fprintf(page, "<div class=tile><b class=\"%s\">%s</b><span>%s</span></div>\n", class, value, label);
}

static void put_tiles(FILE *page, const cli_inspection *inspection) {
    char text[16];
    uint32_t found[2] = {0, 0}, count = megamoe_checkpoint_anomaly_count(inspection->checkpoint);
    for (uint32_t i = 0; i < count; i++) {
        megamoe_anomaly a = {.struct_size = sizeof a};
        if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &a) == MEGAMOE_OK && cli_concerns(inspection, &a))
            found[a.is_error]++;
    }
    fputs("<div class=tiles>\n", page);
    snprintf(text, sizeof text, "%u", inspection->layer_count);
    put_tile(page, "", text, "MoE layers");
    if (inspection->layer_count) {
        snprintf(text, sizeof text, "%u", inspection->layers[0].shape.expert_count);
        put_tile(page, "", text, "experts in a layer");
        put_tile(page, "", cli_bytes_text((double)inspection->layers[0].expert_bytes, text), "one expert");
    }
    put_tile(page, "", cli_bytes_text((double)inspection->bytes, text), "all of it");
    snprintf(text, sizeof text, "%u", found[1]);
    put_tile(page, found[1] ? "error" : "", text, found[1] == 1 ? "error" : "errors");
    snprintf(text, sizeof text, "%u", found[0]);
    put_tile(page, found[0] ? "warning" : "", text, found[0] == 1 ? "warning" : "warnings");
    fputs("</div>\n", page);
}

static void put_layer(FILE *page, const cli_layer_range *range) {
    const megamoe_layer_info *info = &range->info;
    char bytes[16], *router = cli_router_text(info);
    fprintf(page, range->count > 1 ? "<tr><td class=k>%u–%u" : "<tr><td class=k>%u", range->first, range->last);
    fprintf(page, "<td class=n>%u", info->experts_present);
    if (info->experts_present != info->shape.expert_count) fprintf(page, " of %u", info->shape.expert_count);
    fprintf(page, "<td class=n>%u<td class=n>%u × %u<td class=k>%s<td class=k>%s<td>%s<td class=k>%s<td class=n>",
            info->shape.experts_per_token, info->shape.hidden, info->shape.intermediate, info->format, info->naming,
            router, info->shared_format ? info->shared_format : "–");
    if (info->shape.not_gated)
        fputs("relu2", page);
    else if (info->shape.swiglu_limit > 0)
        fprintf(page, "%g", (double)info->shape.swiglu_limit);
    else
        fputs("none", page);
    fprintf(page, "<td class=n>%s</tr>\n", cli_bytes_text((double)cli_layer_bytes(info), bytes));
    free(router);
}

static void put_layers(FILE *page, const cli_inspection *inspection) {
    if (!inspection->range_count) return;
    fputs(
        "<section><h2>Layers</h2><table><tr><th>layers<th class=n>experts<th class=n>per token<th class=n>hidden × inner"
        "<th>format<th>names<th>router<th>shared<th class=n>clamp<th class=n>one layer</tr>\n",
        page);
    for (uint32_t i = 0; i < inspection->range_count; i++) put_layer(page, &inspection->ranges[i]);
    fputs("</table></section>\n", page);
}

static void put_ranks(FILE *page, const cli_inspection *inspection) {
    double most = (double)cli_rank_bytes(inspection, 1);
    if (!inspection->layer_count) return;
    fputs("<section><h2>Memory per rank</h2><table><tr><th class=n>ranks<th class=n>each holds<th class=all></tr>\n",
          page);
    for (uint32_t ranks = 1; ranks <= 64; ranks *= 2) {
        char text[16];
        double bytes = (double)cli_rank_bytes(inspection, ranks);
        fprintf(page, "<tr><td class=n>%u<td class=n>%s<td><div class=bar style=\"width:%.2f%%\"></div></tr>\n", ranks,
                cli_bytes_text(bytes, text), most > 0 ? 100 * bytes / most : 0);
    }
    fputs("</table></section>\n", page);
}

static void put_anomaly(FILE *page, const megamoe_anomaly *a) {
    const char *severity = a->is_error ? "error" : "warning";
    fprintf(page, "<tr><td><span class=\"badge %s\">%s</span><td class=k>", severity, severity);
    put_escaped(page, a->kind);
    fputs("<td class=long>", page);
    put_escaped(page, a->detail);
    fputs("<td class=long>", page);
    put_escaped(page, a->remedy);
    fputs("</tr>\n", page);
}

static void put_anomalies(FILE *page, const cli_inspection *inspection, bool scanned) {
    uint32_t count = megamoe_checkpoint_anomaly_count(inspection->checkpoint), shown = 0;
    fputs("<section><h2>Anomalies</h2>\n", page);
    for (unsigned warnings = 0; warnings < 2; warnings++) /* errors first */
        for (uint32_t i = 0; i < count; i++) {
            megamoe_anomaly a = {.struct_size = sizeof a};
            if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &a) != MEGAMOE_OK || a.is_error == warnings ||
                !cli_concerns(inspection, &a))
                continue;
            if (!shown++) fputs("<table><tr><th>severity<th>kind<th>what<th>remedy</tr>\n", page);
            put_anomaly(page, &a);
        }
    if (shown)
        fputs("</table>\n", page);
    else
        fprintf(page, "<p>None%s.</p>\n",
                scanned ? "; every scale byte was read" : " in headers and scalars; --scan reads the scale bytes too");
    fputs("</section>\n", page);
}

int cli_inspect_html(const cli_inspection *inspection, const char *path, bool scanned) {
    const char *type = megamoe_checkpoint_model_type(inspection->checkpoint);
    char *text = NULL;
    size_t length = 0;
    FILE *page = open_memstream(&text, &length);
    if (!page) return cli_fail("there is no memory for the page %s.", path);
    fprintf(page,
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">"
            "<title>megamoe inspect</title><style>%s</style>\n<h1>",
            style);
    put_escaped(page, inspection->path);
    fputs("</h1>\n<p>", page);
    put_escaped(page, *type ? type : "no model type");
    fprintf(page, " · megamoe %s</p>\n", megamoe_version());
    put_tiles(page, inspection);
    put_layers(page, inspection);
    put_ranks(page, inspection);
    put_anomalies(page, inspection, scanned);
    fputs("</html>\n", page);
    fclose(page);
    int result = cli_write_file(path, text);
    free(text);
    return result;
}
