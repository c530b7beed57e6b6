/* What the test programs share: one line per case, exit status 1 if any failed, and random numbers that are the same
 * everywhere. */
#ifndef SM100_MODEL_TEST_H
#define SM100_MODEL_TEST_H

#include <stdint.h>
#include <stdio.h>
#include <string>

inline int test_failures, test_count; // shared by the files of a program

inline void test_case(const std::string &name, const std::string &problem) {
    test_count++;
    if (!problem.empty()) test_failures++;
    printf("%-4s %s%s%s\n", problem.empty() ? "ok" : "FAIL", name.c_str(), problem.empty() ? "" : ": ",
           problem.c_str());
    fflush(stdout);
}

inline int test_summary(const char *program) {
    printf("%s: %d cases, %d failed\n", program, test_count, test_failures);
    return test_failures != 0;
}

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    uint32_t below(uint32_t n) { return next() % n; }
};

#endif
