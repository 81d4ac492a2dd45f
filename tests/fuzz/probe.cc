// Whether a compiler has libFuzzer: CMakeLists.txt tries to link this.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
