/* Moves boxes of strided tensors to and from one buffer, in one launch: one thread for each element of a box.

   Compiled once for each kind of element, with these defined before it:
     ELEMENT    a type of the tensors' element size; one that can be added, for ADD
     SUM(a, b)  their sum, an ELEMENT, as torch rounds it
     INDEX      an unsigned type that holds twice the number of threads
     DIMS       dimensions of the tensors

   The table has a row for each cell, a box none of whose elements is in another cell, and one for each position of
   its elements in the buffer (several, where boxes overlap):

     cell:      first thread | tensor | offset in it | first position | positions | extents[DIMS] | strides[DIMS]
     position:  offset in the buffer | strides[DIMS]

   Offsets and strides count elements. */

#ifdef __cplusplus
extern "C" {
#endif

#define CELL (5 + 2 * DIMS)
#define POSITION (1 + DIMS)

enum { PACK, UNPACK, ADD };

typedef struct { float re, im; } complex64;
typedef struct { double re, im; } complex128;
typedef struct { unsigned long long low, high; } bits128;
typedef union { float value; unsigned bits; } real;

__device__ static complex64 complex64_sum(complex64 a, complex64 b)
{
    complex64 sum = {a.re + b.re, a.im + b.im};
    return sum;
}

__device__ static complex128 complex128_sum(complex128 a, complex128 b)
{
    complex128 sum = {a.re + b.re, a.im + b.im};
    return sum;
}

__device__ static float from_bfloat16(unsigned short bits)
{
    real wide;
    wide.bits = (unsigned)bits << 16;
    return wide.value;
}

/* To the nearest, ties to even; so is to_float16. */
__device__ static unsigned short to_bfloat16(float value)
{
    real wide;
    wide.value = value;
    if (value != value)
        return 0x7fc0;
    return (unsigned short)((wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16);
}

__device__ static float from_float16(unsigned short bits)
{
    unsigned sign = (unsigned)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    real wide;
    if (magnitude >= 0x7c00) /* infinity or NaN */
        wide.bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
    else if (magnitude < 0x400) /* multiples of 2^-24 */
        wide.value = (float)magnitude * 5.9604644775390625e-8f;
    else
        wide.bits = (magnitude << 13) + 0x38000000;
    wide.bits |= sign;
    return wide.value;
}

__device__ static unsigned short to_float16(float value)
{
    real wide;
    unsigned sign, magnitude;
    wide.value = value;
    sign = wide.bits >> 16 & 0x8000;
    magnitude = wide.bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return 0x7e00;
    if (magnitude >= 0x477ff000) /* 65520: larger values round to infinity */
        return (unsigned short)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* the last bit of 0.5 + x is 2^-24: the addition rounds */
        wide.bits = magnitude;
        wide.value += 0.5f;
        return (unsigned short)(sign | (wide.bits - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (unsigned short)(sign | (magnitude - 0x38000000) >> 13);
}

typedef struct { ELEMENT *at[MOST_TENSORS]; } memory;

/* The cell that thread number `thread` works on: the last one that starts there or before. */
__device__ static const long long *cell_of(const long long *table, int cells, INDEX thread)
{
    int low = 0, high = cells;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if ((INDEX)table[(long long)middle * CELL] <= thread)
            low = middle;
        else
            high = middle;
    }
    return table + (long long)low * CELL;
}

__global__ void move(const __grid_constant__ memory tensors, ELEMENT *buffer, const long long *table, int cells,
                     long long elements, int action)
{
    const long long *positions = table + (long long)cells * CELL;
    const INDEX step = (INDEX)gridDim.x * blockDim.x;
    INDEX thread;
    for (thread = (INDEX)blockIdx.x * blockDim.x + threadIdx.x; thread < (INDEX)elements; thread += step) {
        const long long *cell = cell_of(table, cells, thread), *extents = cell + 5, *strides = extents + DIMS;
        const long long *position = positions + cell[3] * POSITION, *end = position + cell[4] * POSITION;
        ELEMENT *element = tensors.at[cell[1]] + cell[2];
        INDEX rest = thread - (INDEX)cell[0], index[DIMS];
        int dim;
        for (dim = DIMS - 1; dim >= 0; dim--) {
            index[dim] = rest % (INDEX)extents[dim];
            rest /= (INDEX)extents[dim];
            element += (long long)index[dim] * strides[dim];
        }
        for (; position < end; position += POSITION) {
            ELEMENT *packed = buffer + position[0];
            for (dim = 0; dim < DIMS; dim++)
                packed += (long long)index[dim] * position[1 + dim];
            if (action == PACK)
                *packed = *element;
            else if (action == UNPACK)
                *element = *packed;
            else
                *element = SUM(*element, *packed);
        }
    }
}

#ifdef __cplusplus
}
#endif
