/* Launches all kernels of a call by one call from Python: recorded parameters with new pointers filled in. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { MOST = 128 }; /* limit on the parameters of a kernel and on the tensors of a call */

/* the driver's cuLaunchKernel: function, grid, block, shared memory, stream, parameters, extra */
typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **);

/* parameters[slot] is tensors[position] + start */
typedef struct {
  int64_t slot, position, start;
} Pointer;

typedef struct {
  void *function;
  unsigned grid[3], threads, shared;
  Py_ssize_t count, pointer_count;
  uint64_t parameters[MOST];
  Pointer pointers[MOST];
} Kernel;

typedef struct {
  Launch launch;
  Py_ssize_t count;
  Kernel kernels[];
} Program;

static void release(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NULL)); }

static int read_kernel(PyObject *description, Kernel *kernel) {
  unsigned long long function;
  const char *parameters, *pointers;
  Py_ssize_t size, pointers_size;
  if (!PyArg_ParseTuple(description, "KIIIIIy#y#", &function, &kernel->grid[0], &kernel->grid[1], &kernel->grid[2],
                        &kernel->threads, &kernel->shared, &parameters, &size, &pointers, &pointers_size))
    return 0;
  kernel->function = (void *)(uintptr_t)function;
  kernel->count = size / (Py_ssize_t)sizeof(uint64_t);
  kernel->pointer_count = pointers_size / (Py_ssize_t)sizeof(Pointer);
  if (kernel->count > MOST || kernel->pointer_count > MOST) {
    PyErr_Format(PyExc_ValueError, "a kernel has %zd parameters, at most %d are supported", kernel->count, MOST);
    return 0;
  }
  memcpy(kernel->parameters, parameters, (size_t)size);
  memcpy(kernel->pointers, pointers, (size_t)pointers_size);
  for (Py_ssize_t i = 0; i < kernel->pointer_count; i++) {
    Pointer *pointer = &kernel->pointers[i];
    if (pointer->slot < 0 || pointer->slot >= kernel->count || pointer->position < 0 || pointer->position >= MOST) {
      PyErr_SetString(PyExc_ValueError, "a pointer has no place among the parameters or the tensors");
      return 0;
    }
  }
  return 1;
}

/* record(address of cuLaunchKernel, [(function, x, y, z, threads, shared, parameters, pointers), ...]) -> program */
static PyObject *record(PyObject *self, PyObject *args) {
  unsigned long long launch;
  PyObject *kernels;
  if (!PyArg_ParseTuple(args, "KO!", &launch, &PyList_Type, &kernels)) return NULL;
  Py_ssize_t count = PyList_GET_SIZE(kernels);
  Program *program = PyMem_Malloc(sizeof(Program) + (size_t)count * sizeof(Kernel));
  if (!program) return PyErr_NoMemory();
  program->launch = (Launch)(uintptr_t)launch;
  program->count = count;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!read_kernel(PyList_GET_ITEM(kernels, i), &program->kernels[i])) {
      PyMem_Free(program);
      return NULL;
    }
  return PyCapsule_New(program, NULL, release);
}

/* replay(program, stream, *addresses of tensors) -> the driver's error, 0 if there is none */
static PyObject *replay(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t tensors[MOST] = {0}, parameters[MOST];
  void *addresses[MOST];
  if (count < 2 || count - 2 > MOST) {
    PyErr_Format(PyExc_TypeError, "replay takes a program, a stream and at most %d addresses", MOST);
    return NULL;
  }
  Program *program = PyCapsule_GetPointer(args[0], NULL);
  if (!program) return NULL;
  void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
  for (Py_ssize_t i = 2; i < count; i++) tensors[i - 2] = PyLong_AsUnsignedLongLong(args[i]);
  if (PyErr_Occurred()) return NULL;
  int error = 0;
  for (Py_ssize_t i = 0; i < program->count && !error; i++) {
    Kernel *kernel = &program->kernels[i];
    memcpy(parameters, kernel->parameters, (size_t)kernel->count * sizeof(uint64_t));
    for (Py_ssize_t j = 0; j < kernel->pointer_count; j++) {
      Pointer *pointer = &kernel->pointers[j];
      parameters[pointer->slot] = tensors[pointer->position] + (uint64_t)pointer->start;
    }
    for (Py_ssize_t j = 0; j < kernel->count; j++) addresses[j] = &parameters[j];
    error = program->launch(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2], kernel->threads, 1, 1,
                            kernel->shared, stream, addresses, NULL);
  }
  return PyLong_FromLong(error);
}

static PyMethodDef methods[] = {
    {"record", record, METH_VARARGS, NULL},
    {"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "flowformer_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_flowformer_replay(void) { return PyModule_Create(&module); }
