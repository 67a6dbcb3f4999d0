/* What the parts of the device share. Build with -fvisibility=hidden: only EXPORT is seen by other libraries. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <stdbool.h>
#include <pthread.h>
#include <time.h>
#include <sys/mman.h>
#include <unistd.h>
#include <dlfcn.h>
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>

#define EXPORT __attribute__((visibility("default")))
#define GRANULE (2ul << 20)

/* kind: 1 device memory, 2 pinned host memory, 0 free. */
typedef struct {
    uintptr_t begin;
    size_t size;
    int kind;
} Region;

extern size_t device_used;
extern __thread int current_device;
extern __thread cudaError_t last_error;

size_t capacity(void);
int devices(void);
int attribute(int a);
cudaError_t fail(cudaError_t e);
bool usable(void);
FILE *trace(void);
void sync_point(const char *what);
void add_region(void *p, size_t size, int kind);
bool find_region(const void *p, Region *out);
bool remove_region(const void *p, int kind, Region *out);
void *map(size_t size);
size_t copy_limit(void);
