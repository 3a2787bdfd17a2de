/* The step of a pruned network on a CPU: compressed gradient, Adam, dense parameter, in one pass over memory.

   Called through ctypes by samo/native.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { CHUNK = 128, BLOCK = 65536 };

/* Kept elements of one tensor; see samo/index.py. All may be null: every element is kept. */
struct index {
    const uint16_t *offsets;
    const int64_t *starts;
    const int32_t *positions;
};

struct job {
    struct index index;
    int64_t begin, length; /* of the tensor's kept elements */
    void *parameter;       /* dense, from its first element */
    const void *gradient;  /* compressed, from element `begin` */
    float *master;         /* from element `begin`; null: the parameter itself is float32 */
    float *average, *square;
    float decay;    /* what weights are multiplied by (AdamW) */
    float penalty;  /* times the weight, added to the gradient (Adam) */
    float rate1;    /* 1 - beta1 */
    float beta2, rate2;
    float epsilon;  /* times the root of the second bias correction */
    float step;     /* minus the learning rate, times that root, over the first bias correction */
    int32_t type;   /* of parameter and gradient */
};

static inline float from_bfloat16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value != value ? 0x7fc0 : (uint16_t)rounded;
}

static void widen(const void *from, int64_t at, float *to, int count, int type)
{
    if (type == FLOAT32) {
        memcpy(to, (const float *)from + at, 4 * (size_t)count);
    } else if (type == BFLOAT16) {
        const uint16_t *source = (const uint16_t *)from + at;
        for (int i = 0; i < count; i++)
            to[i] = from_bfloat16(source[i]);
    } else {
        const _Float16 *source = (const _Float16 *)from + at;
        for (int i = 0; i < count; i++)
            to[i] = (float)source[i];
    }
}

static void narrow(const float *from, void *to, int count, int type)
{
    if (type == FLOAT32) {
        memcpy(to, from, 4 * (size_t)count);
    } else if (type == BFLOAT16) {
        for (int i = 0; i < count; i++)
            ((uint16_t *)to)[i] = to_bfloat16(from[i]);
    } else {
        for (int i = 0; i < count; i++)
            ((_Float16 *)to)[i] = (_Float16)from[i];
    }
}

#define SCATTER(type, base, positions, values, count)                                                                 \
    for (int i = 0; i < (count); i++)                                                                                 \
    ((type *)(base))[(positions)[i]] = ((const type *)(values))[i]

#define GATHER(base, positions, values, count)                                                                        \
    for (int i = 0; i < (count); i++)                                                                                 \
    (values)[i] = ((const float *)(base))[(positions)[i]]

static void adam(const struct job *job, int64_t at, int count, float *restrict weight, const float *restrict gradient)
{
    float *restrict average = job->average + at, *restrict square = job->square + at;
    const float decay = job->decay, penalty = job->penalty, rate1 = job->rate1, beta2 = job->beta2, rate2 = job->rate2;
    const float epsilon = job->epsilon, step = job->step;
    for (int i = 0; i < count; i++) {
        float w = weight[i] * decay;
        float g = fmaf(penalty, w, gradient[i]);
        float m = fmaf(rate1, g - average[i], average[i]);
        float v = fmaf(rate2 * g, g, square[i] * beta2);
        average[i] = m;
        square[i] = v;
        weight[i] = w + step * m / (sqrtf(v) + epsilon);
    }
}

/* `count` elements from number `at` of the job on. `offsets` or `positions`, if not null, say where they are from `base`. */
static void chunk(const struct job *job, int64_t at, int count, char *base, const uint16_t *offsets,
                  const int32_t *positions, float factor)
{
    float gradient[CHUNK], gathered[CHUNK];
    uint16_t half[CHUNK];
    const int wide = job->type == FLOAT32;
    widen(job->gradient, at, gradient, count, job->type);
    if (factor != 1.0f)
        for (int i = 0; i < count; i++)
            gradient[i] *= factor;
    float *weight = job->master ? job->master + at : gathered;
    if (!job->master) {
        if (offsets)
            GATHER(base, offsets, gathered, count);
        else if (positions)
            GATHER(base, positions, gathered, count);
        else
            weight = (float *)base;
    }
    adam(job, at, count, weight, gradient);
    if (job->master && !wide)
        narrow(weight, offsets || positions ? (void *)half : base, count, job->type);
    if (offsets && wide)
        SCATTER(float, base, offsets, weight, count);
    else if (offsets)
        SCATTER(uint16_t, base, offsets, half, count);
    else if (positions && wide)
        SCATTER(float, base, positions, weight, count);
    else if (positions)
        SCATTER(uint16_t, base, positions, half, count);
}

/* How many of the `left` kept elements from number `first` on are in one block, at most CHUNK; `block` becomes that block. */
static int together(const struct index *index, int64_t first, int64_t left, int64_t *block)
{
    if (index->offsets) {
        while (index->starts[*block + 1] <= first)
            ++*block;
        if (index->starts[*block + 1] - first < left)
            left = index->starts[*block + 1] - first;
    }
    return left < CHUNK ? (int)left : CHUNK;
}

/* From where the positions of kept elements from number `first` on count. */
static int64_t origin(const struct index *index, int64_t first, int64_t block)
{
    return index->offsets ? block * BLOCK : index->positions ? 0 : first;
}

static void run(const struct job *job, float factor)
{
    const struct index *index = &job->index;
    const int64_t width = job->type == FLOAT32 ? 4 : 2;
    int64_t block = 0;
    for (int64_t at = 0; at < job->length;) {
        int64_t first = job->begin + at;
        int count = together(index, first, job->length - at, &block);
        char *base = (char *)job->parameter + width * origin(index, first, block);
        chunk(job, at, count, base, index->offsets ? index->offsets + first : 0,
              index->positions ? index->positions + first : 0, factor);
        at += count;
    }
}

#define COLLECT(type, base, positions, into, count)                                                                   \
    for (int i = 0; i < (count); i++)                                                                                 \
    ((type *)(into))[i] = ((const type *)(base))[(positions)[i]]

static void compress(const struct index *index, const char *dense, int64_t begin, int64_t end, char *into, int add, int type)
{
    const int wide = type == FLOAT32;
    const int64_t width = wide ? 4 : 2;
    uint32_t room[CHUNK] = {0};
    char *found = (char *)room;
    float sum[CHUNK], more[CHUNK];
    int64_t block = 0;
    for (int64_t first = begin; first < end;) {
        int count = together(index, first, end - first, &block);
        const char *base = dense + width * origin(index, first, block);
        char *to = into + width * first, *values = add ? found : to;
        if (index->offsets && wide)
            COLLECT(uint32_t, base, index->offsets + first, values, count);
        else if (index->offsets)
            COLLECT(uint16_t, base, index->offsets + first, values, count);
        else if (wide)
            COLLECT(uint32_t, base, index->positions + first, values, count);
        else
            COLLECT(uint16_t, base, index->positions + first, values, count);
        if (add) {
            widen(to, 0, sum, count, type);
            widen(found, 0, more, count, type);
            for (int i = 0; i < count; i++)
                sum[i] += more[i];
            narrow(sum, to, count, type);
        }
        first += count;
    }
}

/* Do the jobs, on as many threads of the pool that torch computes with. */
void samo_step(const struct job *jobs, int64_t count, int threads, float factor)
{
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < count; i++)
        run(jobs + i, factor);
}

/* Put the `count` kept elements of a dense gradient one after the other, or add them to what is there. */
void samo_compress(const uint16_t *offsets, const int64_t *starts, const int32_t *positions, const void *dense,
                   int64_t count, void *into, int add, int type, int threads)
{
    const struct index index = {offsets, starts, positions};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t end = begin + BLOCK < count ? begin + BLOCK : count;
        compress(&index, dense, begin, end, into, add, type);
    }
}
