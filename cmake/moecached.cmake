# Helpers: warnings, sanitizers, and one line per library or test.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(moecached_options INTERFACE)
target_include_directories(moecached_options INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/client/include)
target_compile_options(moecached_options INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror)
target_compile_definitions(moecached_options INTERFACE MOECACHED_VERSION="${PROJECT_VERSION}")
if(MOECACHED_SANITIZE)
  target_compile_options(moecached_options INTERFACE -fsanitize=${MOECACHED_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(moecached_options INTERFACE -fsanitize=${MOECACHED_SANITIZE})
endif()

# moecached_library(NAME SOURCES a.cc b.cc DEPS x y): a static library of this project.
function(moecached_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC moecached_options ${ARG_DEPS} Threads::Threads)
endfunction()

# moecached_test(NAME SOURCES a_test.cc DEPS x LABELS unit): a GoogleTest program, run by CTest as one test.
function(moecached_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE moecached_options ${ARG_DEPS} GTest::gtest_main GTest::gmock)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
