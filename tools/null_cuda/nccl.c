/* NCCL with the semantics of one rank: a collective copies what this rank contributes. Ranks do not communicate. */
#include <stdlib.h>
#include <string.h>
#include <nccl.h>
#pragma GCC visibility push(default)
typedef struct {
    int ranks, rank;
} Comm;
#define C(c) ((Comm *)(c))
static size_t width(ncclDataType_t t) {
    switch (t) {
    case ncclInt8:
    case ncclUint8: return 1;
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
static ncclResult_t create(ncclComm_t *c, int n, int r) {
    Comm *x = malloc(sizeof *x);
    x->ranks = n;
    x->rank = r;
    *c = (ncclComm_t)x;
    return 0;
}
ncclResult_t ncclGetVersion(int *v) {
    *v = 22809;
    return 0;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *u) {
    memset(u, 7, sizeof *u);
    return 0;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int r) { return create(c, n, r); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int r, ncclConfig_t *g) {
    return create(c, n, r);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int r, int k, ncclUniqueId *id, ncclConfig_t *g) {
    return create(c, n, r);
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *o, ncclConfig_t *g) {
    return create(o, C(c)->ranks, C(c)->rank);
}
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
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                           cudaStream_t st) {
    if (s != r) memmove(r, s, limited(n * width(t)));
    return 0;
}
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t c,
                        cudaStream_t st) {
    if (s != r) memmove(r, s, limited(n * width(t)));
    return 0;
}
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t st) {
    if (s != r && C(c)->rank == root) memmove(r, s, limited(n * width(t)));
    return 0;
}
ncclResult_t ncclBcast(void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { return 0; }
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
    char *d = (char *)r + C(c)->rank * n * width(t);
    if (d != s) memmove(d, s, limited(n * width(t)));
    return 0;
}
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                               cudaStream_t st) {
    const char *d = (const char *)s + C(c)->rank * n * width(t);
    if (d != r) memmove(r, d, limited(n * width(t)));
    return 0;
}
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
    memmove(r, s, limited(n * width(t) * C(c)->ranks));
    return 0;
}
