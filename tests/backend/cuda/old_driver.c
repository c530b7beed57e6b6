/* A libcuda.so.1 from before most of what the library calls. */
int cuInit(unsigned flags);

int cuInit(unsigned flags) {
    (void)flags;
    return 0;
}
