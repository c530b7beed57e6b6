# Compiles one .cu file to a fatbin. A spill, or a wgmma that ptxas serializes, is an error; the log of ptxas is kept,
# because a test compares registers and shared memory with a committed table.
execute_process(
  COMMAND ${NVCC} -O3 -std=c++17 -fmad=false -I${INCLUDE}/src -I${INCLUDE}/include ${TARGETS} -Xptxas -v
          -fatbin -MD -MF ${OUTPUT}.d -MT ${OUTPUT}.fatbin -o ${OUTPUT}.fatbin ${SOURCE}
  RESULT_VARIABLE result
  ERROR_VARIABLE log
  OUTPUT_VARIABLE log_out)
file(WRITE ${OUTPUT}.ptxas "${log}${log_out}")
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${log}${log_out}")
endif()
string(REGEX MATCHALL "[^\n]*(C751[0-9]|[1-9][0-9]* bytes spill|warning)[^\n]*" complaints "${log}")
if(complaints)
  list(JOIN complaints "\n" complaints)
  message(FATAL_ERROR "${SOURCE}: kernels must neither spill nor serialize their wgmma\n${complaints}")
endif()
