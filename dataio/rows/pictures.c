/* A share of a batch's pictures -> pixels, in one call that needs no interpreter.

   Does what dataio/rows/decode.py and views.py do, number by number and bit for bit, for pictures
   of the usual kind: JPEGs that are tidy and upright, and pixels that were kept. Any other is left
   to them, so each message and each rare format is theirs. At the end is a queue of such shares, for
   threads that stay here. It links with the C library alone: libjpeg-turbo's functions come as
   pointers, of the library that dataio/rows/jpeg.py has found.

   Sources: libjpeg-turbo 3's turbojpeg.h; the resize is torch's for uint8 with antialias=True,
   aten/src/ATen/native/cpu/UpSampleKernel.cpp, which is Pillow's src/libImaging/Resample.c. */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

typedef uint8_t u8;

typedef struct { int x, y, w, h; } Region;
typedef struct { int num, denom; } Scale;

typedef struct {
    void *(*init)(int);
    void (*destroy)(void *);
    int (*set)(void *, int, int);
    int (*get)(void *, int);
    int (*header)(void *, const u8 *, size_t);
    int (*scale)(void *, Scale);
    int (*region)(void *, Region);
    int (*decompress)(void *, const u8 *, size_t, u8 *, int, int);
} Turbo;

enum { DECOMPRESS = 1 };
enum { STOP_ON_WARNING = 0, SUBSAMPLING = 4, WIDTH = 5, HEIGHT = 6, PRECISION = 7, COLORS = 8,
       ARITHMETIC = 14, LOSSLESS = 15 };
enum { NEIGHBOURS = 2, MOST_RESIZED = 16, ATTEMPTS = 10, NUM_DRAWS = 4 * ATTEMPTS + 1 };
enum { NO_RESIZE, RESIZE, RESIZE_SHORT, RESIZE_LONG };
enum { NO_CROP, CENTER_CROP, RANDOM_CROP, RANDOM_RESIZED_CROP, PAD };
enum { DONE, LEFT, SKIPPED };

/* Width in pixels of the units that a region can begin at: 444, 422, 420, gray, 440, 411. */
static const int BLOCK[] = {8, 16, 16, 8, 8, 32};

/* How pictures are delivered: an `Image`, or what is left of one for pixels that were kept. */
typedef struct {
    int channels, format, fill, upright, resize, crop;
    int resize_height, resize_width; /* one side twice where proportions stay */
    int height, width;               /* delivered */
    int padding;
    int kept_height, kept_width;     /* of pixels; 0: the data are JPEGs */
    double flip, smallest, largest, narrowest, widest;
} How;

typedef struct { int top, left, height, width; } Box;

typedef struct { u8 *data; size_t size; } Room;

/* Pixels of `height` rows that lie `stride` bytes apart. */
typedef struct { const u8 *data; ptrdiff_t stride; int height, width; } View;

typedef struct {
    const Turbo *turbo;
    const How *how;
    const u8 *data; /* of one picture */
    size_t length;
    Room pixels, rows, middle, weights;
} Work;

/* ---- Memory ---------------------------------------------------------------------------------- */

static void *room(Room *kept, size_t size) {
    if (kept->size < size) {
        free(kept->data);
        kept->data = malloc(size);
        kept->size = kept->data ? size : 0;
    }
    return kept->data;
}

/* ---- Views: dataio/rows/views.py --------------------------------------------------------------- */

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

static int whole(double draw, int most) { return smaller((int)(draw * (most + 1)), most); }

static int find_scale(int height, int width, int out_height, int out_width) {
    for (int scale = 8; scale > 1; scale /= 2)
        if (height >= (int64_t)out_height * scale && width >= (int64_t)out_width * scale)
            return scale;
    return 1;
}

static Box snapped(Box box, const How *how) {
    int s = find_scale(box.height, box.width, how->height, how->width);
    Box found = {box.top - box.top % s, box.left - box.left % s, box.height - box.height % s,
                 box.width - box.width % s};
    return found;
}

static Box random_resized(const How *how, int height, int width, const double *draws) {
    double low = log(how->narrowest), high = log(how->widest);
    for (int attempt = 0; attempt < 4 * ATTEMPTS; attempt += 4) {
        const double *drawn = draws + attempt;
        double share = how->smallest + drawn[0] * (how->largest - how->smallest);
        double pixels = (double)((int64_t)height * width) * share;
        double ratio = exp(low + drawn[1] * (high - low));
        double tall = nearbyint(sqrt(pixels / ratio)), wide = nearbyint(sqrt(pixels * ratio));
        if (0 < tall && tall <= height && 0 < wide && wide <= width) {
            Box box = {whole(drawn[2], height - (int)tall), whole(drawn[3], width - (int)wide),
                       (int)tall, (int)wide};
            return snapped(box, how);
        }
    }
    int tall = height, wide = width;
    if ((double)width / height < how->narrowest)
        tall = smaller((int)nearbyint(width / how->narrowest), height);
    else if ((double)width / height > how->widest)
        wide = smaller((int)nearbyint(height * how->widest), width);
    Box box = {(height - tall) / 2, (width - wide) / 2, tall, wide};
    return snapped(box, how);
}

static void find_resized(const How *how, int height, int width, int *tall, int *wide) {
    int64_t side = how->resize_height;
    int by_height = how->resize == RESIZE_SHORT ? height <= width : height >= width;
    *tall = height, *wide = width;
    if (how->resize == RESIZE)
        *tall = how->resize_height, *wide = how->resize_width;
    else if (how->resize != NO_RESIZE && by_height)
        *tall = (int)side, *wide = (int)(side * width / height);
    else if (how->resize != NO_RESIZE)
        *tall = (int)(side * height / width), *wide = (int)side;
    if (how->resize == RESIZE_LONG)
        *tall = larger(*tall, 1), *wide = larger(*wide, 1);
}

/* Find what is cut out of a picture that was resized; 0: it does not fit. */
static int find_box(const How *how, int height, int width, const double *draws, Box *box) {
    int down = height - how->height, right = width - how->width, room = 2 * how->padding;
    Box found = {0, 0, how->height, how->width};
    if (how->crop == RANDOM_RESIZED_CROP)
        found = random_resized(how, height, width, draws);
    else if (how->crop == PAD)
        found.top = -(-down / 2), found.left = -(-right / 2);
    else if (how->crop == CENTER_CROP)
        found.top = (int)nearbyint(down / 2.0), found.left = (int)nearbyint(right / 2.0);
    else if (how->crop == RANDOM_CROP) {
        found.top = whole(draws[0], larger(down + room, 0)) - how->padding;
        found.left = whole(draws[1], larger(right + room, 0)) - how->padding;
    }
    *box = found;
    switch (how->crop) {
    case NO_CROP: return down == 0 && right == 0;
    case RANDOM_RESIZED_CROP: return 1;
    case PAD: return down <= 0 && right <= 0;
    case RANDOM_CROP: return down + room >= 0 && right + room >= 0;
    default: return down >= 0 && right >= 0;
    }
}

/* ---- Reading: dataio/rows/jpeg.py and orientation.py -------------------------------------------- */

/* Whether a JPEG's header is tidy up to its first scan, with nothing that says how it lies. */
static int is_plain(const u8 *data, size_t length, int upright) {
    if (length < 2 || data[0] != 0xFF || data[1] != 0xD8)
        return 0;
    for (size_t place = 2; upright;) {
        if (place + 4 > length)
            return 0;
        int marker = data[place] << 8 | data[place + 1];
        if (marker == 0xFFDA)
            return 1;
        if (marker == 0xFFE1 || marker < 0xFFC0 || marker == 0xFFFF ||
            (0xFFD0 <= marker && marker < 0xFFDA))
            return 0;
        place += 2 + (size_t)(data[place + 2] << 8 | data[place + 3]);
    }
    return 1;
}

/* Give a box of the picture, decoded at 1 / scale of its size; sides are rounded outwards. */
static int read_box(Work *work, void *jpeg, int height, int width, Box box, int scale, View *found) {
    const How *how = work->how;
    if (jpeg == NULL) {
        found->stride = (ptrdiff_t)width * how->channels;
        found->data = work->data + box.top * found->stride + (ptrdiff_t)box.left * how->channels;
        found->height = box.height, found->width = box.width;
        return 1;
    }
    int tall = (height + scale - 1) / scale, wide = (width + scale - 1) / scale;
    int top = box.top / scale, left = box.left / scale;
    int bottom = smaller((box.top + box.height + scale - 1) / scale, tall);
    int right = smaller((box.left + box.width + scale - 1) / scale, wide);
    int block = larger(BLOCK[work->turbo->get(jpeg, SUBSAMPLING)] / scale, 1);
    int start = larger(left - NEIGHBOURS, 0) / block * block;
    int stop = smaller(right + NEIGHBOURS, wide);
    Scale by = {1, scale};
    Region region = {start, top, stop - start, bottom - top};
    found->stride = (ptrdiff_t)(stop - start) * how->channels;
    u8 *pixels = room(&work->pixels, (size_t)found->stride * (bottom - top));
    if (pixels == NULL || work->turbo->scale(jpeg, by) || work->turbo->region(jpeg, region) ||
        work->turbo->decompress(jpeg, work->data, work->length, pixels, 0, how->format))
        return 0;
    found->data = pixels + (ptrdiff_t)(left - start) * how->channels;
    found->height = bottom - top, found->width = right - left;
    return 1;
}

/* ---- Resizing ------------------------------------------------------------------------------------ */

/* Of each place of a resized side: the first pixel that it is mixed of, how many, and their
   weights, of which `precision` bits are behind the point. */
typedef struct { int taps, precision; int *first, *num; int16_t *weights; } Mix;

static int find_mix(Room *kept, int size, int out, Mix *mix) {
    double scale = (double)size / out, support = scale >= 1.0 ? scale : 1.0;
    double inverse = scale >= 1.0 ? 1.0 / scale : 1.0, most = 0.0;
    int taps = (int)ceil(support) * 2 + 1, even = taps + taps % 2;
    size_t whole_bytes = (size_t)out * (2 * sizeof(int) + even * (sizeof(double) + sizeof(int16_t)));
    double *weights = room(kept, whole_bytes);
    if (weights == NULL)
        return 0;
    mix->first = (int *)(weights + (size_t)out * even);
    mix->num = mix->first + out;
    mix->weights = (int16_t *)(mix->num + out);
    mix->taps = even;
    for (int place = 0; place < out; place++) {
        double *its = weights + (size_t)place * even, center = scale * (place + 0.5), total = 0.0;
        int64_t begin = (int64_t)(center - support + 0.5), end = (int64_t)(center + support + 0.5);
        int first = begin > 0 ? (int)begin : 0, num = (end < size ? (int)end : size) - first;
        num = larger(smaller(num, taps), 0);
        for (int tap = 0; tap < num; tap++) {
            double far = fabs((tap + first - center + 0.5) * inverse);
            its[tap] = far < 1.0 ? 1.0 - far : 0.0;
            total += its[tap];
        }
        for (int tap = 0; tap < num; tap++) {
            if (total != 0.0)
                its[tap] /= total;
            most = its[tap] > most ? its[tap] : most;
        }
        for (int tap = num; tap < even; tap++)
            its[tap] = 0.0;
        mix->first[place] = first, mix->num[place] = num;
    }
    int precision = 0;
    while (precision < 22 && (int)(0.5 + most * (1 << (precision + 1))) < (1 << 15))
        precision++;
    mix->precision = precision;
    for (size_t tap = 0; tap < (size_t)out * even; tap++) {
        double value = weights[tap] * (1 << precision);
        mix->weights[tap] = (int16_t)(value < 0 ? value - 0.5 : value + 0.5);
    }
    return 1;
}

static u8 clamped(int32_t value) { return value < 0 ? 0 : value > 255 ? 255 : (u8)value; }

/* Mix the pixels of a row, for the places from `place` on. */
static void mix_across(const u8 *in, u8 *out, int place, int width, const Mix *mix, int channels) {
    int32_t half = 1 << (mix->precision - 1);
    for (; place < width; place++) {
        const int16_t *weights = mix->weights + (size_t)place * mix->taps;
        const u8 *from = in + (ptrdiff_t)mix->first[place] * channels;
        int32_t sums[4] = {half, half, half, half};
        for (int tap = 0; tap < mix->num[place]; tap++)
            for (int channel = 0; channel < channels; channel++)
                sums[channel] += from[tap * channels + channel] * weights[tap];
        for (int channel = 0; channel < channels; channel++)
            out[place * channels + channel] = clamped(sums[channel] >> mix->precision);
    }
}

/* Mix rows to one, for the bytes from `at` on. */
static void mix_down(const u8 *in, ptrdiff_t stride, u8 *out, int at, int size,
                     const int16_t *weights, int num, int precision) {
    for (; at < size; at++) {
        int32_t sum = 1 << (precision - 1);
        for (int tap = 0; tap < num; tap++)
            sum += in[tap * stride + at] * weights[tap];
        out[at] = clamped(sum >> precision);
    }
}

#ifdef AVX2
static int32_t pair(const int16_t *weights) {
    int32_t both;
    memcpy(&both, weights, sizeof both);
    return both;
}

/* The same for two rows of colours side by side, two pixels at a time; gives where it stopped. */
AVX2 static int mix_across_wide(const u8 *in, ptrdiff_t stride, u8 *out, size_t row, int width,
                                int in_width, const Mix *mix, int channels) {
    const char o = -1;
    const __m256i three = _mm256_setr_epi8(0, o, 3, o, 1, o, 4, o, 2, o, 5, o, o, o, o, o, 0, o, 3,
                                           o, 1, o, 4, o, 2, o, 5, o, o, o, o, o);
    const __m256i four = _mm256_setr_epi8(0, o, 4, o, 1, o, 5, o, 2, o, 6, o, 3, o, 7, o, 0, o, 4,
                                          o, 1, o, 5, o, 2, o, 6, o, 3, o, 7, o);
    const __m256i order = channels == 3 ? three : four;
    const __m256i half = _mm256_set1_epi32(1 << (mix->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(mix->precision);
    int place = 0;
    /* Eight bytes are read for two pixels, and four are written for one. */
    for (; place < width - 1; place++) {
        int num = mix->num[place], first = mix->first[place];
        if ((first + num + num % 2 - 2) * channels + 8 > in_width * channels)
            break;
        const int16_t *weights = mix->weights + (size_t)place * mix->taps;
        const u8 *from = in + (ptrdiff_t)first * channels;
        __m256i sums = half;
        for (int tap = 0; tap < num; tap += 2, from += 2 * channels) {
            __m128i a = _mm_loadl_epi64((const __m128i *)from);
            __m128i b = _mm_loadl_epi64((const __m128i *)(from + stride));
            __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(both, order),
                                                            _mm256_set1_epi32(pair(weights + tap))));
        }
        sums = _mm256_sra_epi32(sums, shift);
        sums = _mm256_packus_epi16(_mm256_packs_epi32(sums, sums), sums);
        int32_t a = _mm256_extract_epi32(sums, 0), b = _mm256_extract_epi32(sums, 4);
        memcpy(out + place * channels, &a, 4), memcpy(out + row + place * channels, &b, 4);
    }
    return place;
}

AVX2 static int mix_down_wide(const u8 *in, ptrdiff_t stride, u8 *out, int size,
                              const int16_t *weights, int num, int precision) {
    const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(precision);
    int at = 0;
    for (; at + 16 <= size; at += 16) {
        __m256i low = half, high = half;
        for (int tap = 0; tap < num; tap += 2) {
            const u8 *row = in + tap * stride + at;
            __m256i both = _mm256_set1_epi32(pair(weights + tap));
            __m128i a = _mm_loadu_si128((const __m128i *)row);
            __m128i b = tap + 1 < num ? _mm_loadu_si128((const __m128i *)(row + stride)) : a;
            __m256i first = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
            __m256i last = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(first, both));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(last, both));
        }
        /* Each half of a register holds four bytes of either. */
        __m256i mixed = _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
        mixed = _mm256_permute4x64_epi64(mixed, 0xD8);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
        _mm_storeu_si128((__m128i *)(out + at), bytes);
    }
    return at;
}
#endif

static int resize(Work *work, View in, u8 *out, int height, int width) {
    int channels = work->how->channels;
    size_t row = (size_t)width * channels;
    Mix mix;
#ifdef AVX2
    int is_wide = __builtin_cpu_supports("avx2");
#endif
    if (in.width != width) {
        u8 *rows = room(&work->rows, row * in.height);
        if (rows == NULL || !find_mix(&work->weights, in.width, width, &mix))
            return 0;
        for (int y = 0, done = 0; y < in.height; y++) {
#ifdef AVX2
            if (y % 2 == 0) /* an odd row is done with the one before it */
                done = is_wide && channels > 1 && y + 1 < in.height
                    ? mix_across_wide(in.data + y * in.stride, in.stride, rows + y * row, row,
                                      width, in.width, &mix, channels)
                    : 0;
#endif
            mix_across(in.data + y * in.stride, rows + y * row, done, width, &mix, channels);
        }
        in.data = rows, in.stride = (ptrdiff_t)row, in.width = width;
    }
    if (in.height == height) {
        for (int y = 0; y < height; y++)
            memcpy(out + y * row, in.data + y * in.stride, row);
        return 1;
    }
    if (!find_mix(&work->weights, in.height, height, &mix))
        return 0;
    for (int y = 0; y < height; y++) {
        const u8 *from = in.data + mix.first[y] * in.stride;
        const int16_t *weights = mix.weights + (size_t)y * mix.taps;
        int done = 0;
#ifdef AVX2
        if (is_wide)
            done = mix_down_wide(from, in.stride, out + y * row, (int)row, weights, mix.num[y], mix.precision);
#endif
        mix_down(from, in.stride, out + y * row, done, (int)row, weights, mix.num[y], mix.precision);
    }
    return 1;
}

/* ---- A picture: `store` of dataio/rows/decode.py --------------------------------------------------- */

static void mirror(u8 *out, int height, int width, int channels) {
    for (int y = 0; y < height; y++, out += (size_t)width * channels)
        for (int a = 0, b = width - 1; a < b; a++, b--)
            for (int channel = 0; channel < channels; channel++) {
                u8 other = out[a * channels + channel];
                out[a * channels + channel] = out[b * channels + channel];
                out[b * channels + channel] = other;
            }
}

static int deliver(Work *work, void *jpeg, int height, int width, const double *draws, u8 *out) {
    const How *how = work->how;
    int tall, wide, channels = how->channels;
    Box box;
    View pixels;
    find_resized(how, height, width, &tall, &wide);
    if (!find_box(how, tall, wide, draws, &box) || box.height < 1 || box.width < 1)
        return 0;
    size_t row = (size_t)how->width * channels;
    int is_resized = tall != height || wide != width;
    int top = larger(box.top, 0), left = larger(box.left, 0);
    int inside_height = smaller(box.top + box.height, tall) - top;
    int inside_width = smaller(box.left + box.width, wide) - left;
    int is_inside = inside_height == box.height && inside_width == box.width;
    Box inside = {top, left, larger(inside_height, 0), larger(inside_width, 0)};
    if (is_resized) {
        Box all = {0, 0, height, width};
        int scale = jpeg == NULL ? 1 : find_scale(height, width, tall, wide);
        int is_all = is_inside && box.height == tall && box.width == wide;
        u8 *middle = out;
        if ((int64_t)tall * wide > (int64_t)MOST_RESIZED * how->height * how->width)
            return 0; /* by parts */
        if (!is_all)
            middle = room(&work->middle, (size_t)tall * wide * channels);
        if (middle == NULL || !read_box(work, jpeg, height, width, all, scale, &pixels) ||
            !(is_all ? resize(work, pixels, out, how->height, how->width)
                     : resize(work, pixels, middle, tall, wide)))
            return 0;
        if (!is_all) {
            pixels.stride = (ptrdiff_t)wide * channels;
            pixels.data = middle + top * pixels.stride + (ptrdiff_t)left * channels;
            pixels.height = inside.height, pixels.width = inside.width;
        } else
            is_inside = 2;
    } else if (inside.height && inside.width) {
        int scale = jpeg == NULL || !is_inside
            ? 1 : find_scale(inside.height, inside.width, how->height, how->width);
        if (!read_box(work, jpeg, height, width, inside, scale, &pixels))
            return 0;
    }
    if (is_inside == 1 && !resize(work, pixels, out, how->height, how->width))
        return 0;
    if (!is_inside) {
        memset(out, how->fill, row * how->height);
        u8 *corner = out + (top - box.top) * row + (size_t)(left - box.left) * channels;
        for (int y = 0; y < inside.height && inside.width; y++)
            memcpy(corner + y * row, pixels.data + y * pixels.stride, (size_t)inside.width * channels);
    }
    if (draws[NUM_DRAWS - 1] < how->flip)
        mirror(out, how->height, how->width, channels);
    return 1;
}

/* Read the header that decode.py's pixels_header writes: give its length, or 0. */
static size_t find_pixels(const u8 *data, size_t length, int channels, int *height, int *width) {
    size_t sides[2] = {0, 0}, at = 3;
    if (length < 11 || data[0] != 'P' || data[1] != (channels == 1 ? '5' : '6') || data[2] != '\n' ||
        channels == 4)
        return 0;
    for (int side = 0; side < 2; side++) {
        size_t start = at;
        while (at < start + 5 && at < length && '0' <= data[at] && data[at] <= '9')
            sides[side] = 10 * sides[side] + (data[at++] - '0');
        if (at == start || at >= length || data[at++] != (side ? '\n' : ' '))
            return 0;
    }
    *width = (int)sides[0], *height = (int)sides[1];
    return at + 4 <= length && !memcmp(data + at, "255\n", 4) && sides[0] && sides[1] &&
        length - at - 4 == sides[0] * sides[1] * channels ? at + 4 : 0;
}

static int decode(Work *work, const double *draws, u8 *out, int32_t *size) {
    const How *how = work->how;
    const Turbo *turbo = work->turbo;
    if (how->kept_height)
        return deliver(work, NULL, how->kept_height, how->kept_width, draws, out);
    size_t header = find_pixels(work->data, work->length, how->channels, size, size + 1);
    if (header) {
        work->data += header;
        return deliver(work, NULL, size[0], size[1], draws, out);
    }
    if (!is_plain(work->data, work->length, how->upright))
        return 0;
    /* One for each picture: another's tables would stand in for those that a picture lacks. */
    void *jpeg = turbo->init(DECOMPRESS);
    if (jpeg == NULL)
        return 0;
    int is_done = 0;
    if (!turbo->set(jpeg, STOP_ON_WARNING, 1) && !turbo->header(jpeg, work->data, work->length)) {
        int sampling = turbo->get(jpeg, SUBSAMPLING), colors = turbo->get(jpeg, COLORS);
        size[0] = turbo->get(jpeg, HEIGHT), size[1] = turbo->get(jpeg, WIDTH);
        if (0 <= sampling && sampling < (int)(sizeof BLOCK / sizeof *BLOCK) && 0 <= colors &&
            colors <= 2 && turbo->get(jpeg, PRECISION) == 8 && turbo->get(jpeg, LOSSLESS) <= 0 &&
            turbo->get(jpeg, ARITHMETIC) <= 0 && size[0] > 0 && size[1] > 0)
            is_done = deliver(work, jpeg, size[0], size[1], draws, out);
    }
    turbo->destroy(jpeg);
    return is_done;
}

/* Which source this was compiled of: a hash that the build gives. */
#define TEXT(name) #name
#define VALUE(name) TEXT(name)
const char tonari_source[] = VALUE(TONARI_SOURCE);

/* Pictures of a field.

   turbo      libjpeg-turbo's functions; not looked at where pixels were kept
   addresses  [num] where each lies
   lengths    [num] their bytes
   low, high  of the key of what is drawn
   numbers    [num] each draws by another; NULL: nothing is drawn
   out        [num][height][width][channels]
   sizes      [num][2] height and width of each, where it was decoded
   states     [num] SKIPPED: leave it out; becomes DONE or LEFT
   begun      those that a thread has taken
   undone     those that are not done
   nanoseconds  that threads have spent on them, and beside it of their processors */
typedef struct Pictures {
    const Turbo *turbo;
    const How *how;
    int64_t num;
    uint64_t low, high;
    const uint64_t *addresses;
    const int64_t *lengths, *numbers;
    u8 *out;
    int32_t *sizes;
    u8 *states;
    struct Pictures *next;
    int64_t begun, undone, nanoseconds, cpu_nanoseconds;
} Pictures;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Draw for a picture, as `uniform` of dataio/base/seeding.py. */
static void draw(const Pictures *all, int64_t at, double *draws) {
    uint64_t own = mix(mix((uint64_t)all->numbers[at] ^ all->low) ^ all->high);
    for (int place = 0; place < NUM_DRAWS; place++)
        draws[place] = ldexp((double)(mix(own + (place + 1) * 0x9E3779B97F4A7C15u) >> 11), -53);
}

/* Deliver some pictures: give how many are LEFT. */
static int64_t deliver_some(Work *work, const Pictures *all, int64_t start, int64_t stop) {
    double draws[NUM_DRAWS] = {0};
    const How *how = all->how;
    size_t size = (size_t)how->height * how->width * how->channels;
    int64_t left = 0;
    work->turbo = all->turbo, work->how = how;
    for (int64_t at = start; at < stop; at++) {
        if (all->states[at] == SKIPPED)
            continue;
        work->data = (const u8 *)(uintptr_t)all->addresses[at];
        work->length = (size_t)all->lengths[at];
        if (all->numbers)
            draw(all, at, draws);
        int is_done = decode(work, draws, all->out + at * size, all->sizes + 2 * at);
        all->states[at] = is_done ? DONE : LEFT;
        left += !is_done;
    }
    return left;
}

/* Let go of memory, if it is more than that. */
static void free_rooms(Work *work, size_t kept) {
    const Work nothing = {0};
    if (work->pixels.size + work->rows.size + work->middle.size + work->weights.size <= kept)
        return;
    free(work->pixels.data), free(work->rows.data), free(work->middle.data), free(work->weights.data);
    *work = nothing;
}

void tonari_pictures(const Pictures *all) {
    Work work = {0};
    deliver_some(&work, all, 0, all->num);
    free_rooms(&work, 0);
}

/* ---- Threads: dataio/batch/unlocked.py ---------------------------------------------------------- */

/* Of a part of the work, and of memory that a thread keeps for the next. */
enum { PART_BYTES = 1 << 14, MOST_KEPT = 1 << 22 };

/* Pictures to be delivered; `lock` guards it, and what threads count of each. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t came, done;
    Pictures *first, *last;
    int is_closed;
} Queue;

const int64_t tonari_queue_bytes = sizeof(Queue);

/* In memory of zeros, which stays as long as a thread or whoever waits may use it. */
void tonari_open(Queue *queue) {
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->came, NULL), pthread_cond_init(&queue->done, NULL);
}

/* Let threads return when all is delivered. */
void tonari_close(Queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->is_closed = 1;
    pthread_cond_broadcast(&queue->came);
    pthread_mutex_unlock(&queue->lock);
}

void tonari_put(Queue *queue, Pictures *all) {
    pthread_mutex_lock(&queue->lock);
    all->next = NULL, all->begun = 0, all->undone = all->num, all->nanoseconds = all->cpu_nanoseconds = 0;
    if (all->num) {
        queue->last = *(queue->first ? &queue->last->next : &queue->first) = all;
        pthread_cond_broadcast(&queue->came);
    }
    pthread_mutex_unlock(&queue->lock);
}

static int64_t now_ns(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return 1000000000 * (int64_t)at.tv_sec + at.tv_nsec;
}

static void end_some(Queue *queue, Pictures *all, const int64_t *rows) {
    all->nanoseconds += now_ns(CLOCK_MONOTONIC) - rows[2];
    all->cpu_nanoseconds += now_ns(CLOCK_THREAD_CPUTIME_ID) - rows[3];
    /* Once none is undone, whoever sees it may let go of them. */
    if (!(all->undone -= rows[1] - rows[0]))
        pthread_cond_broadcast(&queue->done);
}

/* Deliver pictures until some are LEFT: give these, and in rows[0], rows[1] where they begin and end. The
   caller ends them by handing both back; rows[2], rows[3] are when they were given. NULL: the
   queue is closed, and nothing is left. */
Pictures *tonari_serve(Queue *queue, Pictures *ended, int64_t *rows) {
    Work work = {0};
    int64_t left = 0;
    pthread_mutex_lock(&queue->lock);
    if (ended)
        end_some(queue, ended, rows);
    for (;;) {
        while (!queue->first && !queue->is_closed)
            pthread_cond_wait(&queue->came, &queue->lock);
        Pictures *all = queue->first;
        if (all) {
            int64_t stop = all->begun, bytes = 0;
            rows[0] = stop, rows[2] = now_ns(CLOCK_MONOTONIC), rows[3] = now_ns(CLOCK_THREAD_CPUTIME_ID);
            while (stop < all->num && bytes < PART_BYTES)
                bytes += all->lengths[stop++];
            rows[1] = all->begun = stop;
            if (stop == all->num)
                queue->first = all->next;
        }
        pthread_mutex_unlock(&queue->lock);
        if (all)
            left = deliver_some(&work, all, rows[0], rows[1]);
        free_rooms(&work, all && !left ? MOST_KEPT : 0);
        if (!all || left)
            return all;
        pthread_mutex_lock(&queue->lock);
        end_some(queue, all, rows);
    }
}

/* Wait until all pictures are done; 0: they are not, after some seconds. */
int tonari_wait(Queue *queue, const Pictures *all, double seconds) {
    int64_t until = now_ns(CLOCK_REALTIME) + (int64_t)(1e9 * seconds);
    struct timespec at = {until / 1000000000, until % 1000000000};
    pthread_mutex_lock(&queue->lock);
    while (all->undone && !pthread_cond_timedwait(&queue->done, &queue->lock, &at))
        ;
    int is_done = !all->undone;
    pthread_mutex_unlock(&queue->lock);
    return is_done;
}
