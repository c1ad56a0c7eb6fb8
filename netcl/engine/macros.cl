// What the kernels of every family share; launch.py puts it before their files. epilogue() is generated for ops that have an epilogue.
// Where callers give several macros together or none of them, one #ifndef has the defaults of all.
#ifndef REAL  // the type arithmetic is done in, and sums are kept in
#define REAL float
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#ifndef EXP_BELOW  // exp of what is not far above 0
#define EXP_BELOW(x) exp(x)
#endif
#ifndef UNROLL  // in front of loops whose arrays are registers; recurrent layers define it as nothing on CPUs, whose compilers take long
#define UNROLL _Pragma("unroll")
#endif

#ifndef FETCHES  // 1: the compiler knows __builtin_prefetch; OpenCL's own prefetch is an empty call on PoCL
#define FETCHES 0
#endif
#if FETCHES
#define FETCH_AHEAD(p) __builtin_prefetch((const void*)(size_t)(p))
#else
#define FETCH_AHEAD(p) ((void)0)
#endif

#ifndef ADDED  // 1: an epilogue adds one value per value of the result
#define ADDED 0
#endif
#ifndef ADDED_T
#define ADDED_T float
#define ADDED_LOAD(p, i) ((p)[i])
#endif
#if ADDED
#define ADDED_AT(at) ((REAL)ADDED_LOAD(added, at))
#else
#define ADDED_AT(at) ((REAL)0)
#endif

// REPEAT(n, F): F(0) F(1) .. F(n - 1), for registers that have names instead of indices. n: a number of at most 12, or a macro for one.
#define REPEAT(n, F) REPEAT_(n, F)
#define REPEAT_(n, F) REPEAT_##n(F)
#define REPEAT_1(F) F(0)
#define REPEAT_2(F) REPEAT_1(F) F(1)
#define REPEAT_3(F) REPEAT_2(F) F(2)
#define REPEAT_4(F) REPEAT_3(F) F(3)
#define REPEAT_5(F) REPEAT_4(F) F(4)
#define REPEAT_6(F) REPEAT_5(F) F(5)
#define REPEAT_7(F) REPEAT_6(F) F(6)
#define REPEAT_8(F) REPEAT_7(F) F(7)
#define REPEAT_9(F) REPEAT_8(F) F(8)
#define REPEAT_10(F) REPEAT_9(F) F(9)
#define REPEAT_11(F) REPEAT_10(F) F(10)
#define REPEAT_12(F) REPEAT_11(F) F(11)
