// The macros of generated bodies. Each may be defined before this text (a dtype's LOAD and STORE, for instance).
#ifndef LOAD
#define LOAD(p, i) ((p)[i])              // value of element i
#endif
#ifndef STORE
#define STORE(p, i, x) ((p)[i] = (x))    // element i becomes x
#endif
#ifndef ADD
#define ADD(a, b) ((a) + (b))
#endif
#ifndef SUB
#define SUB(a, b) ((a) - (b))
#endif
#ifndef MUL
#define MUL(a, b) ((a) * (b))
#endif
#ifndef DIV
#define DIV(a, b) ((a) / (b))
#endif
#ifndef WHERE
#define WHERE(c, a, b) ((c) ? (a) : (b))
#endif
#ifndef MAX                              // NaN wins, as in NumPy; fmax would lose it
#define MAX(a, b) (((a) != (a) || (a) > (b)) ? (a) : (b))
#endif
#ifndef MIN
#define MIN(a, b) (((a) != (a) || (a) < (b)) ? (a) : (b))
#endif
#ifndef RELU
#define RELU(x) (((x) <= 0) ? 0 : (x))   // +0 for -Inf and every negative number; NaN stays
#endif
#ifndef EXP
#define EXP(x) exp(x)
#endif
#ifndef LOG
#define LOG(x) log(x)
#endif
#ifndef SQRT
#define SQRT(x) sqrt(x)
#endif
#ifndef TANH
#define TANH(x) tanh(x)
#endif
#ifndef ABS
#define ABS(x) fabs(x)
#endif
