/* Kernels are inlined into their loops, whose constant counts then unroll into registers. Not under a sanitizer: each inlined copy is checked
 * anew, and compiling takes many minutes. */
#ifndef COLIBRI_KERNELS_INLINE_H
#define COLIBRI_KERNELS_INLINE_H

#ifdef COLIBRI_KERNELS_OUTLINE
#define KERNELS_INLINE static __attribute__((noinline, unused))
#else
#define KERNELS_INLINE static inline __attribute__((always_inline))
#endif

#endif
