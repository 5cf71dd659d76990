// SPDX-License-Identifier: Apache-2.0
//
// Lets a library built with a recent compiler load on a host of manylinux_2_28 (glibc 2.28,
// libstdc++ of GCC 8). Templates that newer libstdc++ exports, so that the compiler would call
// them there, are instantiated here instead; torch's headers use them for error messages.
#include <sstream>

template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

// shared_ptr reads this flag of glibc 2.32 to leave out atomic operations. Ours says: never.
extern "C" {
extern char __libc_single_threaded __attribute__((visibility("hidden")));
char __libc_single_threaded = 0;
}

// glibc 2.29 gave these new versions, which differ in how they report errors (not at all). The
// linker sends our calls here (--wrap), and on to the version that every glibc has.
#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
#endif
#define FORWARD(name)                                   \
  extern "C" double base_##name(double);                \
  __asm__(".symver base_" #name "," #name "@" BASE);    \
  extern "C" double __wrap_##name(double x) { return base_##name(x); }
FORWARD(exp)
FORWARD(exp2)
FORWARD(log)
FORWARD(log2)
