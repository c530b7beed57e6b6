# The CMakeLists.txt of a project that uses the installed library.
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C)
find_package(megamoe 0.1 REQUIRED)
add_executable(consumer consumer.c)
target_link_libraries(consumer PRIVATE megamoe::megamoe)
