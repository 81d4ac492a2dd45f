// The C test once more, as C++17.
#include "tests/abi/header_test.c"
