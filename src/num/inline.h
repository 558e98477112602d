/* SPDX-License-Identifier: Apache-2.0 */
/* The definitions of src/num are the same source on the host and in CUDA kernels. */
#ifndef MM_NUM_INLINE_H
#define MM_NUM_INLINE_H

#ifdef __CUDACC__
#define MM_NUM_INLINE static __device__ __forceinline__
#else
#define MM_NUM_INLINE static inline
#endif

#endif
