/* A libcuda.so.1 that computes nothing and records what it is asked to launch.
 *
 * It stands in for the driver under Triton's own launcher, so that a machine without a GPU can say which
 * bytes a kernel would have been given. It refuses what a Hopper device would refuse on the host side (unknown
 * functions, blocks that are too large, tensor maps that break TMA's rules), because a launch that could not
 * have happened must not count as recorded.
 *
 * The size of each parameter is read from the loaded cubin, where the driver itself finds it: the attributes
 * EIATTR_KPARAM_INFO of the section .nv.info.<function>.
 */
#include "cuda.h"
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define MAX_PARAMS 512
#define MAX_ATTRIBUTES 8
#define SHARED_OPT_IN 232448 /* bytes that a block of an H100 may have */
#define SHARED_DEFAULT 49152

typedef struct Module {
  struct Module *next;
  unsigned char *image;
  uint64_t code; /* a hash of the image: modules of the same code are the same, loaded twice or not */
  int loaded;
} Module;

typedef struct Function {
  struct Function *next;
  Module *module;
  char *name;
  int params;
  uint32_t shared_limit, size[MAX_PARAMS];
} Function;

/* What Python reads, field by field: keep it in step with stub_cuda.py. */
typedef struct {
  uint64_t code, stream;
  uint32_t grid[3], block[3], shared, attributes, params;
  uint32_t attribute[MAX_ATTRIBUTES][4]; /* id, then the first three words of its value */
  const char *name;
  const uint32_t *sizes;
  unsigned char *bytes; /* the parameters, one after the other */
} Launch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Module *modules;
static Function *functions;
static Launch *log_;
static uint64_t logged, room;
static uint64_t encoded, pointers_asked;
static char why[256] = "no error";

static CUresult refuse(CUresult code, const char *reason) {
  snprintf(why, sizeof why, "stub: %s", reason);
  return code;
}

/* What Python asks */

API uint64_t stub_launches(void) { return logged; }
API const Launch *stub_launch(uint64_t i) { return i < logged ? &log_[i] : NULL; }
API uint64_t stub_encoded(void) { return encoded; }
API uint64_t stub_pointers_asked(void) { return pointers_asked; }

API void stub_clear(void) {
  pthread_mutex_lock(&lock);
  for (uint64_t i = 0; i < logged; i++)
    free(log_[i].bytes);
  logged = encoded = pointers_asked = 0;
  pthread_mutex_unlock(&lock);
}

/* Devices and contexts: one H100 */

API CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int *version) {
  *version = 13020; /* up to 13.1 Triton corrects bits of a tensor map, which here mean something else */
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = why;
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = "CUDA_ERROR_OF_STUB";
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int i) {
  *device = i;
  return i == 0 ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_DEVICE, "there is device 0 and no other");
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch ((int)attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_OPT_IN; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED_OPT_IN + 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
  default: return refuse(CUDA_ERROR_INVALID_VALUE, "a device attribute that it does not know");
  }
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)&modules;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }
API CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }
API CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

API CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

/* Memory of the host is taken for memory of the device. */
API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a pointer attribute that it does not know");
  pthread_mutex_lock(&lock);
  pointers_asked++;
  pthread_mutex_unlock(&lock);
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

/* Modules and functions */

static uint64_t image_size(const unsigned char *image) {
  const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image;
  if (memcmp(elf->e_ident, ELFMAG, SELFMAG) || elf->e_ident[EI_CLASS] != ELFCLASS64)
    return 0;
  uint64_t end = elf->e_shoff + (uint64_t)elf->e_shnum * elf->e_shentsize;
  const Elf64_Shdr *section = (const Elf64_Shdr *)(image + elf->e_shoff);
  for (int i = 0; i < elf->e_shnum; i++)
    if (section[i].sh_type != SHT_NOBITS && section[i].sh_offset + section[i].sh_size > end)
      end = section[i].sh_offset + section[i].sh_size;
  const Elf64_Phdr *segment = (const Elf64_Phdr *)(image + elf->e_phoff);
  for (int i = 0; i < elf->e_phnum; i++)
    if (segment[i].p_offset + segment[i].p_filesz > end)
      end = segment[i].p_offset + segment[i].p_filesz;
  uint64_t headers = elf->e_phoff + (uint64_t)elf->e_phnum * elf->e_phentsize;
  return headers > end ? headers : end;
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image) {
  uint64_t size = image_size(image);
  if (!size)
    return refuse(CUDA_ERROR_INVALID_IMAGE, "the module is no cubin");
  Module *module = calloc(1, sizeof *module);
  module->image = malloc(size);
  memcpy(module->image, image, size);
  module->code = 0xcbf29ce484222325; /* FNV-1a */
  for (uint64_t i = 0; i < size; i++)
    module->code = (module->code ^ module->image[i]) * 0x100000001b3;
  module->loaded = 1;
  pthread_mutex_lock(&lock);
  module->next = modules;
  modules = module;
  pthread_mutex_unlock(&lock);
  *out = (CUmodule)module;
  return CUDA_SUCCESS;
}

static Module *module_of(CUmodule handle) {
  Module *module = modules;
  while (module && (module != (Module *)handle || !module->loaded))
    module = module->next;
  return module;
}

/* Nothing is freed: no later handle may equal one that somebody still holds. */
API CUresult cuModuleUnload(CUmodule handle) {
  Module *module = module_of(handle);
  if (!module)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "no such module to unload");
  module->loaded = 0;
  return CUDA_SUCCESS;
}

/* Sizes of a function's parameters. An attribute is a format, a kind, and 2 bytes: its value or its length. */
static CUresult read_params(const unsigned char *image, const char *name, Function *function) {
  const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *section = (const Elf64_Shdr *)(image + elf->e_shoff);
  const char *names = (const char *)image + section[elf->e_shstrndx].sh_offset;
  char wanted[4096];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", name);
  const Elf64_Shdr *info = NULL;
  for (int i = 0; i < elf->e_shnum; i++)
    if (!strcmp(names + section[i].sh_name, wanted))
      info = &section[i];
  if (!info)
    return refuse(CUDA_ERROR_NOT_FOUND, "the module has no such function");
  int64_t total = -1, end = 0;
  const unsigned char *at = image + info->sh_offset, *last = at + info->sh_size;
  while (at + 4 <= last) {
    uint8_t format = at[0], kind = at[1];
    uint16_t number;
    memcpy(&number, at + 2, 2);
    at += 4;
    if (format == 3 && kind == 0x19) /* EIATTR_CBANK_PARAM_SIZE */
      total = number;
    if (format != 4) /* its value is in those 2 bytes */
      continue;
    if (kind == 0x45) /* EIATTR_KPARAM_INFO_V2, of parameters that need more than 4 KB */
      return refuse(CUDA_ERROR_INVALID_IMAGE, "parameters are declared in a way that it cannot read");
    if (kind == 0x17) { /* EIATTR_KPARAM_INFO: index, ordinal, offset, and bits of which the last are a size */
      uint32_t bits;
      uint16_t ordinal, offset;
      memcpy(&ordinal, at + 4, 2);
      memcpy(&offset, at + 6, 2);
      memcpy(&bits, at + 8, 4);
      if (ordinal >= MAX_PARAMS)
        return refuse(CUDA_ERROR_INVALID_IMAGE, "too many parameters");
      function->size[ordinal] = bits >> 18;
      if (ordinal >= function->params)
        function->params = ordinal + 1;
      if (offset + (int64_t)(bits >> 18) > end)
        end = offset + (bits >> 18);
    }
    at += number;
  }
  for (int i = 0; i < function->params; i++)
    if (!function->size[i])
      return refuse(CUDA_ERROR_INVALID_IMAGE, "a parameter without a size");
  if (total != end)
    return refuse(CUDA_ERROR_INVALID_IMAGE, "parameters do not add up to what the cubin says they take");
  return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
  Module *module = module_of(handle);
  if (!module)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "no such module");
  Function *function = calloc(1, sizeof *function);
  CUresult code = read_params(module->image, name, function);
  if (code != CUDA_SUCCESS) {
    free(function);
    return code;
  }
  function->module = module;
  function->name = strdup(name);
  function->shared_limit = SHARED_DEFAULT;
  pthread_mutex_lock(&lock);
  function->next = functions;
  functions = function;
  pthread_mutex_unlock(&lock);
  *out = (CUfunction)function;
  return CUDA_SUCCESS;
}

static Function *function_of(CUfunction handle) {
  Function *function = functions;
  while (function && function != (Function *)handle)
    function = function->next;
  return function && function->module->loaded ? function : NULL;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  if (!function_of(handle))
    return refuse(CUDA_ERROR_INVALID_HANDLE, "no such function");
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Function *function = function_of(handle);
  if (!function)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "no such function");
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= SHARED_OPT_IN)
    function->shared_limit = value;
  else if (attribute != CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a function attribute, or a value of it, that no H100 has");
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  return function_of(handle) ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_HANDLE, "no such function");
}

API CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle, const CUlaunchConfig *config) {
  *clusters = 1;
  return function_of(handle) ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_HANDLE, "no such function");
}

/* Tensor maps: every argument, in bytes that no two different maps share */

typedef struct __attribute__((packed)) {
  uint64_t address, stride[4];
  uint32_t dim[5]; /* less 1: they go up to 2^32 */
  uint8_t im2col, type, rank, interleave, swizzle, promotion, fill;
  uint8_t step[5];
  union __attribute__((packed)) {
    uint16_t box[5];
    struct __attribute__((packed)) {
      int32_t lower[3], upper[3];
      uint32_t channels, pixels;
    };
  };
} Map;

_Static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a map has 128 bytes");

static CUresult fill_map(Map *map, int type, uint32_t rank, void *address, const cuuint64_t *dim,
                         const cuuint64_t *stride, const cuuint32_t *step, int interleave, int swizzle,
                         int promotion, int fill) {
  if (rank < 1 || rank > 5)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a tensor map has 1 to 5 dimensions");
  if ((uintptr_t)address % 16)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a tensor map begins at a multiple of 16 bytes");
  map->address = (uintptr_t)address;
  map->type = type, map->rank = rank, map->interleave = interleave, map->swizzle = swizzle;
  map->promotion = promotion, map->fill = fill;
  for (uint32_t i = 0; i < rank; i++) {
    if (dim[i] < 1 || dim[i] > 1ull << 32)
      return refuse(CUDA_ERROR_INVALID_VALUE, "a tensor map has 1 to 2^32 elements along a dimension");
    if (step[i] < 1 || step[i] > 8)
      return refuse(CUDA_ERROR_INVALID_VALUE, "elements of a tensor map are 1 to 8 apart");
    map->dim[i] = dim[i] - 1;
    map->step[i] = step[i];
  }
  for (uint32_t i = 0; i + 1 < rank; i++) { /* the last one, where there is one, is not read */
    if (stride[i] % 16 || stride[i] >= 1ull << 40)
      return refuse(CUDA_ERROR_INVALID_VALUE, "strides are multiples of 16 bytes below 2^40");
    map->stride[i] = stride[i];
  }
  return CUDA_SUCCESS;
}

static void write_map(CUtensorMap *out, const Map *map) {
  memset(out, 0, sizeof *out);
  memcpy(out, map, sizeof *map);
  pthread_mutex_lock(&lock);
  encoded++;
  pthread_mutex_unlock(&lock);
}

API CUresult cuTensorMapEncodeTiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                    const cuuint64_t *dim, const cuuint64_t *stride, const cuuint32_t *box,
                                    const cuuint32_t *step, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
  Map map = {0};
  CUresult code =
      fill_map(&map, type, rank, address, dim, stride, step, interleave, swizzle, promotion, fill);
  for (uint32_t i = 0; code == CUDA_SUCCESS && i < rank; i++) {
    if (box[i] < 1 || box[i] > 256)
      code = refuse(CUDA_ERROR_INVALID_VALUE, "a box has 1 to 256 elements along a dimension");
    map.box[i] = box[i];
  }
  if (code == CUDA_SUCCESS)
    write_map(out, &map);
  return code;
}

API CUresult cuTensorMapEncodeIm2col(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank,
                                     void *address, const cuuint64_t *dim, const cuuint64_t *stride,
                                     const int *lower, const int *upper, cuuint32_t channels,
                                     cuuint32_t pixels, const cuuint32_t *step,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Map map = {.im2col = 1};
  CUresult code =
      fill_map(&map, type, rank, address, dim, stride, step, interleave, swizzle, promotion, fill);
  for (uint32_t i = 0; code == CUDA_SUCCESS && i + 2 < rank; i++)
    map.lower[i] = lower[i], map.upper[i] = upper[i];
  map.channels = channels, map.pixels = pixels;
  if (code == CUDA_SUCCESS)
    write_map(out, &map);
  return code;
}

/* Launches */

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **params, void **extra) {
  Function *function = function_of(handle);
  if (!function)
    return refuse(CUDA_ERROR_INVALID_HANDLE, "no such function to launch, or its module was unloaded");
  Launch made = {
      .code = function->module->code, .stream = (uintptr_t)config->hStream,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
      .shared = config->sharedMemBytes, .attributes = config->numAttrs, .params = function->params,
      .name = function->name, .sizes = function->size,
  };
  uint64_t threads = (uint64_t)made.block[0] * made.block[1] * made.block[2];
  if (threads < 1 || threads > 1024)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a block has 1 to 1024 threads");
  if (!made.grid[0] || !made.grid[1] || !made.grid[2] || made.grid[0] >> 31 || made.grid[1] >> 16 ||
      made.grid[2] >> 16)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a grid that no device takes");
  if (made.shared > function->shared_limit)
    return refuse(CUDA_ERROR_INVALID_VALUE, "more shared memory than the function was allowed");
  if (made.attributes > MAX_ATTRIBUTES || extra)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "more attributes than it keeps, or parameters given as extra");
  for (uint32_t i = 0; i < made.attributes; i++) {
    made.attribute[i][0] = config->attrs[i].id;
    memcpy(&made.attribute[i][1], &config->attrs[i].value, 3 * sizeof(uint32_t));
  }
  uint64_t total = 0;
  for (int i = 0; i < function->params; i++)
    total += function->size[i];
  made.bytes = malloc(total + 1);
  for (int i = 0, at = 0; i < function->params; at += function->size[i], i++)
    memcpy(made.bytes + at, params[i], function->size[i]);
  pthread_mutex_lock(&lock);
  if (logged == room)
    log_ = realloc(log_, (room = room ? 2 * room : 64) * sizeof *log_);
  log_[logged++] = made;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
