/* NCCL between processes of one machine: a communicator is a file in /dev/shm, in which each rank has a part.

   An operation ends before its call returns, as all work of this device does; sends are buffered. Numbers are reduced in
   double precision and rounded once, so that all ranks get the same bits. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>
#include <nccl.h>
#pragma GCC visibility push(default)

#define CHUNK (1ul << 20)
#define MAIL (4ul << 20)
#define NAME_BYTES 64
#define PATIENCE_SECONDS 300

/* A message from one rank to another one, in pieces of up to MAIL bytes; 0 bytes: there is none. */
typedef struct {
    _Atomic size_t nbytes;
    char data[MAIL];
} Mail;
typedef struct {
    _Atomic int arrived, round;
} Barrier;
/* The file: a barrier, one part of CHUNK bytes per rank, and one mail per sender and receiver. */
typedef struct {
    char name[NAME_BYTES];
    int ranks, rank, splits;
    size_t nbytes;
    Barrier *barrier;
    char *parts;
    Mail *mails;
} Comm;
#define C(c) ((Comm *)(c))

static void give_up_after(time_t began, const char *what, Comm *c) {
    if (time(NULL) - began < PATIENCE_SECONDS) {
        sched_yield();
        return;
    }
    fprintf(stderr, "null NCCL: rank %d of %d waited %d s for others (%s, %s)\n", c->rank, c->ranks, PATIENCE_SECONDS,
            what, c->name);
    abort();
}
static void meet(Comm *c, const char *what) {
    int round = atomic_load(&c->barrier->round);
    if (atomic_fetch_add(&c->barrier->arrived, 1) + 1 == c->ranks) {
        atomic_store(&c->barrier->arrived, 0);
        atomic_fetch_add(&c->barrier->round, 1);
        return;
    }
    time_t began = time(NULL);
    while (atomic_load(&c->barrier->round) == round) give_up_after(began, what, c);
}
static char *part(Comm *c, int rank) { return c->parts + rank * CHUNK; }
static Mail *mail(Comm *c, int from, int to) { return &c->mails[from * c->ranks + to]; }

static size_t width(ncclDataType_t t) {
    switch (t) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 1;
    }
}
static size_t limited(size_t n) {
    static size_t v;
    if (!v) {
        const char *t = getenv("NULL_CUDA_COPY");
        v = t ? strtoull(t, 0, 10) : (size_t)-1;
    }
    return n < v ? n : v;
}
static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* ---------------------------------------------------------------- communicators */

static ncclResult_t create(ncclComm_t *out, const char *name, int ranks, int rank) {
    Comm *c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->ranks = ranks;
    c->rank = rank;
    *out = (ncclComm_t)c;
    if (ranks == 1) return 0;
    char path[NAME_BYTES + 32];
    snprintf(path, sizeof path, "/dev/shm/null-nccl-%s", name);
    size_t head = 4096, parts = ranks * CHUNK, mails = (size_t)ranks * ranks * sizeof(Mail);
    c->nbytes = head + parts + mails;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    /* New bytes are 0, so whichever rank is first begins with an empty barrier. */
    if (file < 0 || ftruncate(file, c->nbytes)) return ncclSystemError;
    char *memory = mmap(NULL, c->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return ncclSystemError;
    c->barrier = (Barrier *)memory;
    c->parts = memory + head;
    c->mails = (Mail *)(memory + head + parts);
    meet(c, "joining");
    if (rank == 0) unlink(path);
    return 0;
}
static const char *name_of(const ncclUniqueId *id) { return id->internal; }

ncclResult_t ncclGetVersion(int *v) {
    *v = 22809;
    return 0;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *u) {
    unsigned long long random[2];
    memset(u, 0, sizeof *u);
    if (getrandom(random, sizeof random, 0) != sizeof random) return ncclSystemError;
    snprintf(u->internal, sizeof u->internal, "%016llx%016llx", random[0], random[1]);
    return 0;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int r) { return create(c, name_of(&id), n, r); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int r, ncclConfig_t *g) {
    return create(c, name_of(&id), n, r);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int r, int k, ncclUniqueId *id, ncclConfig_t *g) {
    return create(c, name_of(id), n, r);
}
ncclResult_t ncclCommSplit(ncclComm_t p, int color, int key, ncclComm_t *out, ncclConfig_t *g) {
    Comm *c = C(p);
    int number = c->splits++, ranks = 0, rank = 0;
    if (c->ranks > 1) {
        int own[2] = {color, key};
        memcpy(part(c, c->rank), own, sizeof own);
        meet(c, "split");
    }
    for (int r = 0; r < c->ranks; r++) {
        int other[2] = {color, key};
        if (c->ranks > 1) memcpy(other, part(c, r), sizeof other);
        if (other[0] != color) continue;
        ranks++;
        /* Equal keys are ordered by the rank in the parent. */
        if (other[1] < key || (other[1] == key && r < c->rank)) rank++;
    }
    if (c->ranks > 1) meet(c, "split");
    *out = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return 0;
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%.40s-%d-%d", c->name, number, color);
    return create(out, name, ranks, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t p) {
    if (C(p)->barrier) munmap(C(p)->barrier, C(p)->nbytes);
    free(p);
    return 0;
}
ncclResult_t ncclCommAbort(ncclComm_t p) { return ncclCommDestroy(p); }
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) {
    *n = C(c)->ranks;
    return 0;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) {
    *n = C(c)->rank;
    return 0;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) {
    *e = 0;
    return 0;
}
const char *ncclGetErrorString(ncclResult_t r) { return "null"; }
const char *ncclGetLastError(ncclComm_t c) { return "null"; }
ncclResult_t ncclMemAlloc(void **p, size_t n) {
    *p = malloc(n);
    return 0;
}
ncclResult_t ncclMemFree(void *p) {
    free(p);
    return 0;
}

/* ---------------------------------------------------------------- numbers */

static double factors[1024];
static _Atomic int num_factors;

/* An operation that multiplies what a rank contributes by a number, and adds up. */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t t, ncclScalarResidence_t where,
                                      ncclComm_t c);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) { return 0; }

static double number(const char *p, ncclDataType_t t) {
    switch (t) {
    case ncclInt8: return *(const int8_t *)p;
    case ncclUint8: return *(const uint8_t *)p;
    case ncclInt32: return *(const int32_t *)p;
    case ncclUint32: return *(const uint32_t *)p;
    case ncclFloat16: return (double)*(const _Float16 *)p;
    case ncclFloat32: return *(const float *)p;
    case ncclFloat64: return *(const double *)p;
    case ncclBfloat16: {
        uint32_t bits = (uint32_t) * (const uint16_t *)p << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    default: return 0;
    }
}
static void set_number(char *p, ncclDataType_t t, double value) {
    switch (t) {
    case ncclInt8: *(int8_t *)p = value; break;
    case ncclUint8: *(uint8_t *)p = value; break;
    case ncclInt32: *(int32_t *)p = value; break;
    case ncclUint32: *(uint32_t *)p = value; break;
    case ncclFloat16: *(_Float16 *)p = (_Float16)value; break;
    case ncclFloat32: *(float *)p = (float)value; break;
    case ncclFloat64: *(double *)p = value; break;
    case ncclBfloat16: {
        float rounded = (float)value;
        uint32_t bits;
        memcpy(&bits, &rounded, sizeof bits);
        /* To nearest, ties to even. NaN keeps a bit of its mantissa. */
        if (rounded != rounded) bits |= 1u << 22;
        else bits += 0x7fff + (bits >> 16 & 1);
        *(uint16_t *)p = bits >> 16;
        break;
    }
    default: break;
    }
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t t, ncclScalarResidence_t where,
                                      ncclComm_t c) {
    int slot = atomic_fetch_add(&num_factors, 1) % 1024;
    factors[slot] = number(scalar, t);
    *op = ncclNumOps + slot;
    return 0;
}
static double combined(double one, double other, ncclRedOp_t op) {
    switch (op) {
    case ncclProd: return one * other;
    case ncclMax: return other > one ? other : one;
    case ncclMin: return other < one ? other : one;
    default: return one + other;
    }
}
/* Exact, unlike in double precision. */
static int64_t combined_integers(int64_t one, int64_t other, ncclRedOp_t op) {
    switch (op) {
    case ncclProd: return one * other;
    case ncclMax: return other > one ? other : one;
    case ncclMin: return other < one ? other : one;
    default: return one + other;
    }
}
/* Reduce *n* bytes of all parts into *out*. */
static void reduce(Comm *c, char *out, size_t n, ncclDataType_t t, ncclRedOp_t op) {
    size_t size = width(t);
    for (size_t i = 0; i + size <= n; i += size) {
        if (t == ncclInt64 || t == ncclUint64) {
            int64_t sum = *(int64_t *)(part(c, 0) + i);
            for (int r = 1; r < c->ranks; r++) sum = combined_integers(sum, *(int64_t *)(part(c, r) + i), op);
            *(int64_t *)(out + i) = op == ncclAvg ? sum / c->ranks : sum;
            continue;
        }
        double factor = op >= ncclNumOps ? factors[op - ncclNumOps] : 1;
        double sum = factor * number(part(c, 0) + i, t);
        for (int r = 1; r < c->ranks; r++) sum = combined(sum, factor * number(part(c, r) + i, t), op);
        set_number(out + i, t, op == ncclAvg ? sum / c->ranks : sum);
    }
}

/* ---------------------------------------------------------------- collectives */

/* Give the bytes from *start* on to the others, and return when all parts can be read. */
static size_t share(Comm *c, const char *source, size_t start, size_t end, const char *what) {
    size_t n = least(CHUNK, end - start);
    if (source) memcpy(part(c, c->rank), source + start, n);
    meet(c, what);
    return n;
}
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t p,
                           cudaStream_t st) {
    Comm *c = C(p);
    size_t all = limited(n * width(t));
    if (c->ranks == 1 && s != r) memmove(r, s, all);
    for (size_t i = 0, done; c->ranks > 1 && i < all; i += done) {
        done = share(c, s, i, all, "all_reduce");
        reduce(c, (char *)r + i, done, t, o);
        meet(c, "all_reduce");
    }
    return 0;
}
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t p,
                        cudaStream_t st) {
    Comm *c = C(p);
    size_t all = limited(n * width(t));
    if (c->ranks == 1 && s != r) memmove(r, s, all);
    for (size_t i = 0, done; c->ranks > 1 && i < all; i += done) {
        done = share(c, s, i, all, "reduce");
        if (c->rank == root) reduce(c, (char *)r + i, done, t, o);
        meet(c, "reduce");
    }
    return 0;
}
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t p,
                           cudaStream_t st) {
    Comm *c = C(p);
    size_t all = limited(n * width(t));
    if (c->rank == root && s != r) memmove(r, s, all);
    for (size_t i = 0, done; c->ranks > 1 && i < all; i += done) {
        done = share(c, c->rank == root ? s : NULL, i, all, "broadcast");
        if (c->rank != root) memcpy((char *)r + i, part(c, root), done);
        meet(c, "broadcast");
    }
    return 0;
}
ncclResult_t ncclBcast(void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
    return ncclBroadcast(r, r, n, t, root, c, st);
}
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t p, cudaStream_t st) {
    Comm *c = C(p);
    size_t each = n * width(t), all = limited(each);
    char *own = (char *)r + c->rank * each;
    if (c->ranks == 1 && own != s) memmove(own, s, all);
    for (size_t i = 0, done; c->ranks > 1 && i < all; i += done) {
        done = share(c, s, i, all, "all_gather");
        for (int k = 0; k < c->ranks; k++) memcpy((char *)r + k * each + i, part(c, k), done);
        meet(c, "all_gather");
    }
    return 0;
}
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t p,
                               cudaStream_t st) {
    Comm *c = C(p);
    size_t each = n * width(t), all = limited(each);
    if (c->ranks == 1 && s != r) memmove(r, s, all);
    /* The result may be in the place of this rank's input, which the others still need: it is copied at the end. */
    char *result = c->ranks > 1 ? malloc(all + 1) : NULL;
    for (int k = 0; c->ranks > 1 && k < c->ranks; k++) {
        for (size_t i = 0, done; i < all; i += done) {
            done = share(c, (const char *)s + k * each, i, all, "reduce_scatter");
            if (k == c->rank) reduce(c, result + i, done, t, o);
            meet(c, "reduce_scatter");
        }
    }
    if (result) memcpy(r, result, all);
    free(result);
    return 0;
}

/* ---------------------------------------------------------------- messages */

typedef struct {
    Comm *comm;
    int peer;
    bool sends;
    char *data;
    size_t nbytes, done;
    bool is_complete;
} Message;
static __thread Message *queue;
static __thread size_t queued, capacity_of_queue;
static __thread int depth;

/* Move the next bytes of a message if its mail allows it; returns whether it did. */
static bool advance(Message *m) {
    Comm *c = m->comm;
    int from = m->sends ? c->rank : m->peer, to = m->sends ? m->peer : c->rank;
    Mail *box = mail(c, from, to);
    size_t nbytes = atomic_load(&box->nbytes);
    if (m->sends == (nbytes != 0)) return false;
    if (m->sends) {
        nbytes = least(MAIL, m->nbytes - m->done);
        memcpy(box->data, m->data + m->done, nbytes);
        atomic_store(&box->nbytes, nbytes);
    } else {
        memcpy(m->data + m->done, box->data, nbytes);
        atomic_store(&box->nbytes, 0);
    }
    m->done += nbytes;
    m->is_complete = m->done == m->nbytes;
    return true;
}
static bool is_first(size_t i) {
    for (size_t k = 0; k < i; k++) {
        Message *one = &queue[k], *other = &queue[i];
        bool same = one->comm == other->comm && one->peer == other->peer && one->sends == other->sends;
        if (!one->is_complete && same) return false;
    }
    return true;
}
static void exchange(void) {
    time_t began = time(NULL);
    for (size_t left = queued; left;) {
        bool moved = false;
        for (size_t i = 0; i < queued; i++) {
            if (queue[i].is_complete || !is_first(i)) continue;
            if (!advance(&queue[i])) continue;
            moved = true;
            left -= queue[i].is_complete;
        }
        if (moved) began = time(NULL);
        else if (left) give_up_after(began, "send and receive", queue[0].comm);
    }
    queued = 0;
}
static ncclResult_t post(void *data, size_t nbytes, int peer, bool sends, ncclComm_t c) {
    if (C(c)->ranks == 1 || nbytes == 0) return 0;
    if (queued == capacity_of_queue) {
        capacity_of_queue = 2 * capacity_of_queue + 16;
        queue = realloc(queue, capacity_of_queue * sizeof *queue);
    }
    queue[queued++] = (Message){C(c), peer, sends, data, nbytes};
    if (depth == 0) exchange();
    return 0;
}
ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
    return post((void *)s, limited(n * width(t)), peer, true, c);
}
ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
    return post(r, limited(n * width(t)), peer, false, c);
}
ncclResult_t ncclGroupStart(void) {
    depth++;
    return 0;
}
ncclResult_t ncclGroupEnd(void) {
    if (--depth == 0) exchange();
    return 0;
}
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
    size_t each = n * width(t);
    if (C(c)->ranks == 1) memmove(r, s, limited(each));
    ncclGroupStart();
    for (int k = 0; k < C(c)->ranks; k++) {
        ncclSend((const char *)s + k * each, n, t, k, c, st);
        ncclRecv((char *)r + k * each, n, t, k, c, st);
    }
    return ncclGroupEnd();
}
