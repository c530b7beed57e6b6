# Says which test was skipped and why; ctest recognizes the first word.
message("skipped ${NAME}: ${REASON}")
