/*
 * Captures on the fake driver, for tests that find these functions in it (dlsym): what a CUDA graph does, without the
 * driver's own calls for it.
 */
#ifndef TESTS_SM100_FAKE_CAPTURE_H
#define TESTS_SM100_FAKE_CAPTURE_H

#ifdef __cplusplus
extern "C" {
#endif

/* From here on, launches on this stream are kept and not run. */
void fake_capture_begin(void *stream);
/* How many there were of Blackwell's kernels; and the first call that a capture does not allow (an allocation, a wait,
 * a copy from or to host memory, a launch on another stream), or NULL. */
const char *fake_capture_end(unsigned *launches);
/* Runs what was kept, with the arguments of that time and the memory of now; 0 if a kernel failed. */
int fake_replay(void);

#ifdef __cplusplus
}
#endif

#endif
