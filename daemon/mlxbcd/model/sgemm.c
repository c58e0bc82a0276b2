/* cblas_sgemm for MLX on the Linux CPU (32-bit integers), on top of a full BLAS that mlxbc_blas_start is given.
 *
 * Decoding multiplies a handful of rows by weights that are read from memory once per step. A general gemm first packs
 * those weights, which costs more than the product. The kernels here read each weight once, keep a block of
 * rows x columns of sums in registers, and leave matrices of many rows to the full BLAS.
 *
 * Every sum runs over k in one order, which depends on k alone and not on the rows beside it, nor on the number of
 * threads: up to FEW_ROWS rows, a row's result is the same bits alone and in a batch.
 *
 * Work is handed out in small chunks, which the calling thread takes as well. So a helper that the system has put aside
 * delays nothing but the chunk it holds, where a fixed share per thread would wait a whole time slice for it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

enum { ROW_MAJOR = 101, NO_TRANS = 111 };
enum { LANES = VECTOR_BYTES / sizeof(float) };
enum { FEW_ROWS = 32 };                   /* most rows of the kernels here */
enum { BLOCK_COLUMNS = 24 };              /* divisible by the column counts of `dots` below */
enum { PLAIN_BLOCK = 64 };                /* the widest block of `axpys` */
enum { CHUNK_BYTES = 128 * 1024 };        /* of weights per chunk: a few microseconds */
enum { PARALLEL_FLOPS = 4 * 1000 * 1000 };/* below, waking a helper costs more than it saves */
enum { FULL_CHUNK = 192 };                /* rows or columns of C per call of the full BLAS */
enum { SPIN_NS = 60 * 1000 };             /* a helper stays awake this long: most products of a layer follow sooner */
enum { MAX_HELPERS = 63 };

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef float unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

typedef void gemm(int order, int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                  const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

/* C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C, row-major */
typedef struct {
    int ta, tb;
    int64_t m, n, k, lda, ldb, ldc;
    float alpha, beta;
    const float *a, *b;
    float *c;
} product;

static gemm *full;

/* ------------------------------------------------------------------------------------------------ few rows */

INLINE vector load(const float *p) { return *(const unaligned *)p; }

/* x * y + sum. Said, since which sums a compiler fuses by itself differs from one block of the kernels to another (it is
 * told to fuse none), and with it the last bit. */
INLINE vector fused(vector x, vector y, vector sum) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + sum;
#endif
}

INLINE void store(const product *p, int64_t row, int64_t column, float sum) {
    float *c = p->c + row * p->ldc + column;
    *c = p->beta == 0.0f ? p->alpha * sum : p->alpha * sum + p->beta * *c; /* C may hold NaN where beta is 0 */
}

typedef float quad __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t quad_of_int __attribute__((vector_size(16)));
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (quad_of_int){i, j, k, l})
#endif

/* All lanes added into four, in a fixed order. */
INLINE quad fold(vector v) {
    quad part[VECTOR_BYTES / 16];
    memcpy(part, &v, sizeof v);
#if VECTOR_BYTES == 64
    return (part[0] + part[2]) + (part[1] + part[3]);
#elif VECTOR_BYTES == 32
    return part[0] + part[1];
#else
    return part[0];
#endif
}

/* The totals of four vectors. */
INLINE quad sums_of(vector v0, vector v1, vector v2, vector v3) {
    quad q0 = fold(v0), q1 = fold(v1), q2 = fold(v2), q3 = fold(v3);
    quad a = PICK(q0, q1, 0, 4, 1, 5) + PICK(q0, q1, 2, 6, 3, 7);
    quad b = PICK(q2, q3, 0, 4, 1, 5) + PICK(q2, q3, 2, 6, 3, 7);
    return PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7);
}

/* B transposed: rows x columns dot products of contiguous vectors. */
INLINE void dots(const product *p, const int rows, const int columns, int64_t row, int64_t column) {
    const float *a = p->a + row * p->lda, *b = p->b + column * p->ldb;
    const int64_t k = p->k, lda = p->lda, ldb = p->ldb;
    const int count = rows * columns;
    vector sums[24];
    UNROLL for (int i = 0; i < count; i++) sums[i] = (vector){0};
    int64_t t = 0;
    for (; t + LANES <= k; t += LANES) {
        vector w[8];
        UNROLL for (int j = 0; j < columns; j++) {
            w[j] = load(b + j * ldb + t);
            __builtin_prefetch(b + (j + columns) * ldb + t); /* the next block: hardware prefetch stops at pages */
        }
        UNROLL for (int i = 0; i < rows; i++) {
            vector x = load(a + i * lda + t);
            UNROLL for (int j = 0; j < columns; j++) sums[i * columns + j] = fused(x, w[j], sums[i * columns + j]);
        }
    }
    UNROLL for (int i = 0; i < count; i += 4) {
        const int last = count - 1;
        quad four = sums_of(sums[i], sums[i + 1 < last ? i + 1 : last], sums[i + 2 < last ? i + 2 : last],
                            sums[i + 3 < last ? i + 3 : last]);
        UNROLL for (int l = 0; l < (count - i < 4 ? count - i : 4); l++) {
            const int r = (i + l) / columns, c = (i + l) % columns;
            float sum = four[l];
            for (int64_t rest = t; rest < k; rest++) sum += a[r * lda + rest] * b[c * ldb + rest];
            store(p, row + r, column + c, sum);
        }
    }
}

#define DOTS(ROWS, COLUMNS)                                                       \
    case ROWS:                                                                    \
        for (; j + COLUMNS <= stop; j += COLUMNS) dots(p, ROWS, COLUMNS, row, j); \
        break;

/* Registers hold rows * columns sums, the columns' weights and one row: 32 with AVX-512, else 16. */
static void transposed_columns(const product *p, int64_t begin, int64_t end) {
#if VECTOR_BYTES == 64
    enum { ROWS = 8 };
#else
    enum { ROWS = 4 };
#endif
    for (int64_t at = begin; at < end; at += BLOCK_COLUMNS) {
        const int64_t stop = at + BLOCK_COLUMNS < end ? at + BLOCK_COLUMNS : end;
        for (int64_t row = 0; row < p->m; row += ROWS) {
            const int64_t left = p->m - row < ROWS ? p->m - row : ROWS;
            int64_t j = at;
            switch (left) {
#if VECTOR_BYTES == 64
                DOTS(1, 8) DOTS(2, 8) DOTS(3, 6) DOTS(4, 6) DOTS(5, 4) DOTS(6, 4) DOTS(7, 3) DOTS(8, 3)
#else
                DOTS(1, 8) DOTS(2, 4) DOTS(3, 3) DOTS(4, 2)
#endif
            }
            for (; j < stop; j++)
                for (int64_t i = row; i < row + left; i++) dots(p, 1, 1, i, j);
        }
    }
}

/* B as it is: rows x width vectors of sums, each step adding a row of B times one element of A. */
INLINE void axpys(const product *p, const int rows, const int width, int64_t row, int64_t column) {
    const float *a = p->a + row * p->lda, *b = p->b + column;
    vector sums[16];
    UNROLL for (int i = 0; i < rows * width; i++) sums[i] = (vector){0};
    for (int64_t t = 0; t < p->k; t++) {
        UNROLL for (int j = 0; j < width; j++) {
            const vector w = load(b + t * p->ldb + j * LANES);
            UNROLL for (int i = 0; i < rows; i++)
                sums[i * width + j] = fused(a[i * p->lda + t] - (vector){0}, w, sums[i * width + j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < width; j++) {
            unaligned *c = (unaligned *)(p->c + (row + i) * p->ldc + column + j * LANES);
            const vector scaled = p->alpha * sums[i * width + j];
            *c = p->beta == 0.0f ? scaled : scaled + p->beta * *c;
        }
}

#define AXPYS(ROWS)                                                                         \
    case ROWS:                                                                              \
        for (; j + WIDTH * LANES <= end; j += WIDTH * LANES) axpys(p, ROWS, WIDTH, row, j); \
        break;

static void plain_columns(const product *p, int64_t begin, int64_t end) {
#if VECTOR_BYTES == 64
    enum { WIDTH = 4 };
#else
    enum { WIDTH = 2 };
#endif
    for (int64_t row = 0; row < p->m; row += 4) {
        const int64_t left = p->m - row < 4 ? p->m - row : 4;
        int64_t j = begin;
        switch (left) { AXPYS(1) AXPYS(2) AXPYS(3) AXPYS(4) }
        for (; j + LANES <= end; j += LANES)
            for (int64_t i = row; i < row + left; i++) axpys(p, 1, 1, i, j);
        for (; j < end; j++)
            for (int64_t i = row; i < row + left; i++) {
                float sum = 0.0f;
                for (int64_t t = 0; t < p->k; t++) sum += p->a[i * p->lda + t] * p->b[t * p->ldb + j];
                store(p, i, j, sum);
            }
    }
}

/* ------------------------------------------------------------------------------------------------ many rows */

static void full_block(const product *p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    full(ROW_MAJOR, p->ta, p->tb, rows, columns, p->k, p->alpha, p->a + row * (p->ta == NO_TRANS ? p->lda : 1), p->lda,
         p->b + column * (p->tb == NO_TRANS ? 1 : p->ldb), p->ldb, p->beta, p->c + row * p->ldc + column, p->ldc);
}

static void full_rows(const product *p, int64_t begin, int64_t end) { full_block(p, begin, end - begin, 0, p->n); }
static void full_columns(const product *p, int64_t begin, int64_t end) { full_block(p, 0, p->m, begin, end - begin); }

/* ------------------------------------------------------------------------------------------------ threads */

typedef void work(const product *, int64_t begin, int64_t end);

static struct {
    int helpers;
    atomic_int busy;            /* one product at a time has the helpers; others run on their own thread */
    atomic_int open, inside;    /* helpers inside the current job, which they may enter while it is open */
    atomic_uint generation;     /* counts jobs */
    atomic_int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    work *run;
    const product *product;
    int64_t total, chunk;
    atomic_int_fast64_t next;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void take_chunks(void) {
    for (;;) {
        const int64_t begin = atomic_fetch_add(&pool.next, pool.chunk);
        if (begin >= pool.total) return;
        const int64_t end = begin + pool.chunk;
        pool.run(pool.product, begin, end < pool.total ? end : pool.total);
    }
}

static void *helper(void *unused) {
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        const int64_t until = now_ns() + SPIN_NS;
        while (atomic_load(&pool.generation) == seen && now_ns() < until) {
            for (int i = 0; i < 32; i++) relax();
            sched_yield(); /* whoever else wants this core comes first */
        }
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.asleep, 1);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        /* Enter first, then look: the caller closes first, then waits for all who are inside. */
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open)) take_chunks();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return 0;
}

static void parallel(work *run, const product *p, int64_t total, int64_t chunk) {
    const double flops = 2.0 * p->m * p->n * p->k;
    if (pool.helpers == 0 || flops < PARALLEL_FLOPS || total <= chunk || atomic_exchange(&pool.busy, 1)) {
        /* In the same chunks, so that the bits of a result do not depend on who computed it. */
        for (int64_t begin = 0; begin < total; begin += chunk)
            run(p, begin, begin + chunk < total ? begin + chunk : total);
        return;
    }
    pool.run = run;
    pool.product = p;
    pool.total = total;
    pool.chunk = chunk;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks();
    atomic_store(&pool.open, 0);
    for (unsigned turn = 1; atomic_load(&pool.inside); turn++) {
        relax();
        if (turn % 64 == 0) sched_yield();
    }
    atomic_store(&pool.busy, 0);
}

/* ------------------------------------------------------------------------------------------------ entry points */

/* `implementation` does what is not done here, on the calling thread alone. Returns the threads that products use. */
int mlxbc_blas_start(gemm *implementation, int threads) {
    full = implementation;
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.helpers < threads - 1 && pool.helpers < MAX_HELPERS) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, 0)) break;
        pthread_detach(thread);
        pool.helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return pool.helpers + 1;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR || m <= 0 || n <= 0 || k <= 0) {
        full(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    const product p = {ta, tb, m, n, k, lda, ldb, ldc, alpha, beta, a, b, c};
    if (ta == NO_TRANS && m <= FEW_ROWS) {
        const int64_t block = tb == NO_TRANS ? PLAIN_BLOCK : BLOCK_COLUMNS;
        const int64_t blocks = CHUNK_BYTES / (int64_t)sizeof(float) / k / block;
        parallel(tb == NO_TRANS ? plain_columns : transposed_columns, &p, n, (blocks ? blocks : 1) * block);
        return;
    }
    if (m > n)
        parallel(full_rows, &p, m, FULL_CHUNK);
    else
        parallel(full_columns, &p, n, FULL_CHUNK);
}
