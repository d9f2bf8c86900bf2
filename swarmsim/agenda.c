/* event_queue.py in C, callback by callback the same; that file says what is what and which decisions are whose.
   Python 3.11 and newer, compiled at first use (event_queue.build). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define COMPACT_TIMERS 512

typedef struct Agenda Agenda;

typedef struct {
    PyObject_HEAD
    PyObject *callback; /* NULL: cancelled, or run */
    PyObject *args;     /* a tuple, or NULL: none */
    PyObject *context;
    Agenda *agenda; /* not owned; while it is in the heap of timers */
    double when;
    char cancelled;
} Handle;

typedef struct {
    double when;
    double draw;
    unsigned long long serial;
    Handle *handle;
} Timer;

struct Agenda {
    PyObject_HEAD
    PyObject *draw;
    PyObject *owner;
    PyObject *raised;
    PyObject *frozen;
    Handle **ready; /* a ring */
    Py_ssize_t ready_room, ready_first, ready_count;
    Timer *timers; /* a heap */
    Py_ssize_t timers_room, timers_count, timers_cancelled;
    unsigned long long serial;
    long long callbacks;
    double now;
    PyObject *now_object;
};

static PyObject *name_done, *name_get, *name_context;
static PyTypeObject *HandleType;

/* ---- handles */

static int handle_traverse(Handle *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->callback);
    Py_VISIT(self->args);
    Py_VISIT(self->context);
    return 0;
}

static int handle_clear(Handle *self) {
    Py_CLEAR(self->callback);
    Py_CLEAR(self->args);
    Py_CLEAR(self->context);
    return 0;
}

static void handle_dealloc(Handle *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    handle_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static void timer_cancelled(Agenda *agenda);

static PyObject *handle_cancel(Handle *self, PyObject *unused) {
    if (!self->cancelled) {
        self->cancelled = 1;
        Py_CLEAR(self->callback);
        Py_CLEAR(self->args);
        Py_CLEAR(self->context);
        if (self->agenda != NULL)
            timer_cancelled(self->agenda);
    }
    Py_RETURN_NONE;
}

static PyObject *handle_cancelled(Handle *self, PyObject *unused) { return PyBool_FromLong(self->cancelled); }

static PyObject *handle_when(Handle *self, PyObject *unused) { return PyFloat_FromDouble(self->when); }

static PyMethodDef handle_methods[] = {
    {"cancel", (PyCFunction)handle_cancel, METH_NOARGS, NULL},
    {"cancelled", (PyCFunction)handle_cancelled, METH_NOARGS, NULL},
    {"when", (PyCFunction)handle_when, METH_NOARGS, NULL},
    {NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, handle_dealloc}, {Py_tp_traverse, handle_traverse}, {Py_tp_clear, handle_clear},
    {Py_tp_methods, handle_methods}, {0, NULL},
};

static PyType_Spec handle_spec = {
    .name = "swarmnode_agenda.Handle",
    .basicsize = sizeof(Handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = handle_slots,
};

/* `args` and `kwnames` as of a vectorcall, after the callback; the only keyword is `context`. */
static Handle *handle_new(PyObject *callback, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *context = NULL, *tuple = NULL;
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, 0);
        if (PyTuple_GET_SIZE(kwnames) > 1 || PyUnicode_Compare(name, name_context) != 0) {
            PyErr_Format(PyExc_TypeError, "unexpected keyword argument %R", name);
            return NULL;
        }
        if (args[nargs] != Py_None)
            context = Py_NewRef(args[nargs]);
    }
    if (context == NULL && (context = PyContext_CopyCurrent()) == NULL)
        return NULL;
    if (nargs > 0) {
        if ((tuple = PyTuple_New(nargs)) == NULL) {
            Py_DECREF(context);
            return NULL;
        }
        for (Py_ssize_t i = 0; i < nargs; i++)
            PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    Handle *handle = PyObject_GC_New(Handle, HandleType);
    if (handle == NULL) {
        Py_DECREF(context);
        Py_XDECREF(tuple);
        return NULL;
    }
    handle->callback = Py_NewRef(callback);
    handle->args = tuple;
    handle->context = context;
    handle->agenda = NULL;
    handle->when = 0.0;
    handle->cancelled = 0;
    PyObject_GC_Track(handle);
    return handle;
}

/* ---- the ring of ready ones; both take the reference */

static int ready_push(Agenda *self, Handle *handle) {
    if (self->ready_count == self->ready_room) {
        Py_ssize_t room = self->ready_room ? 2 * self->ready_room : 64;
        Handle **ring = PyMem_New(Handle *, room);
        if (ring == NULL) {
            Py_DECREF(handle);
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t i = 0; i < self->ready_count; i++)
            ring[i] = self->ready[(self->ready_first + i) % self->ready_room];
        PyMem_Free(self->ready);
        self->ready = ring;
        self->ready_room = room;
        self->ready_first = 0;
    }
    self->ready[(self->ready_first + self->ready_count++) & (self->ready_room - 1)] = handle;
    return 0;
}

static Handle *ready_pop(Agenda *self) {
    Handle *handle = self->ready[self->ready_first];
    self->ready_first = (self->ready_first + 1) & (self->ready_room - 1);
    self->ready_count--;
    return handle;
}

/* ---- the heap of timers */

static inline int earlier(const Timer *a, const Timer *b) {
    if (a->when != b->when)
        return a->when < b->when;
    if (a->draw != b->draw)
        return a->draw < b->draw;
    return a->serial < b->serial;
}

static void sift_up(Timer *heap, Py_ssize_t at) {
    Timer timer = heap[at];
    while (at > 0) {
        Py_ssize_t parent = (at - 1) / 2;
        if (!earlier(&timer, &heap[parent]))
            break;
        heap[at] = heap[parent];
        at = parent;
    }
    heap[at] = timer;
}

static void sift_down(Timer *heap, Py_ssize_t count, Py_ssize_t at) {
    Timer timer = heap[at];
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && earlier(&heap[child + 1], &heap[child]))
            child++;
        if (!earlier(&heap[child], &timer))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = timer;
}

static Handle *timer_pop(Agenda *self) {
    Handle *handle = self->timers[0].handle;
    handle->agenda = NULL;
    if (--self->timers_count > 0) {
        self->timers[0] = self->timers[self->timers_count];
        sift_down(self->timers, self->timers_count, 0);
    }
    return handle;
}

static void timer_cancelled(Agenda *self) {
    if (++self->timers_cancelled <= COMPACT_TIMERS || 2 * self->timers_cancelled <= self->timers_count)
        return;
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < self->timers_count; i++) {
        Handle *handle = self->timers[i].handle;
        if (handle->cancelled) {
            handle->agenda = NULL;
            Py_DECREF(handle); /* what it held is gone already: this runs no Python */
        } else
            self->timers[kept++] = self->timers[i];
    }
    self->timers_count = kept;
    self->timers_cancelled = 0;
    for (Py_ssize_t at = kept / 2 - 1; at >= 0; at--)
        sift_down(self->timers, kept, at);
}

/* ---- what asyncio asks for */

static PyObject *agenda_time(Agenda *self, PyObject *unused) { return Py_NewRef(self->now_object); }

static PyObject *agenda_call_soon(Agenda *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "call_soon needs a callback");
        return NULL;
    }
    Handle *handle = handle_new(args[0], args + 1, nargs - 1, kwnames);
    if (handle == NULL || ready_push(self, (Handle *)Py_NewRef(handle)) < 0) {
        Py_XDECREF(handle);
        return NULL;
    }
    return (PyObject *)handle;
}

static PyObject *set_timer(Agenda *self, double when, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (when != when) {
        PyErr_SetString(PyExc_ValueError, "a timer for NaN");
        return NULL;
    }
    PyObject *drawn = PyObject_CallNoArgs(self->draw);
    if (drawn == NULL)
        return NULL;
    double draw = PyFloat_AsDouble(drawn);
    Py_DECREF(drawn);
    if (draw == -1.0 && PyErr_Occurred())
        return NULL;
    Handle *handle = handle_new(args[0], args + 1, nargs - 1, kwnames);
    if (handle == NULL)
        return NULL;
    if (self->timers_count == self->timers_room) {
        Py_ssize_t room = self->timers_room ? 2 * self->timers_room : 64;
        Timer *heap = self->timers;
        if (PyMem_Resize(heap, Timer, room) == NULL) {
            Py_DECREF(handle);
            return PyErr_NoMemory();
        }
        self->timers = heap;
        self->timers_room = room;
    }
    handle->when = when;
    handle->agenda = self;
    self->timers[self->timers_count] = (Timer){when, draw, ++self->serial, (Handle *)Py_NewRef(handle)};
    sift_up(self->timers, self->timers_count++);
    return (PyObject *)handle;
}

static PyObject *call_in(Agenda *self, double base, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 2) {
        PyErr_SetString(PyExc_TypeError, "a timer needs a time and a callback");
        return NULL;
    }
    double seconds = PyFloat_AsDouble(args[0]);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    return set_timer(self, base + seconds, args + 1, nargs - 1, kwnames);
}

static PyObject *agenda_call_at(Agenda *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return call_in(self, 0.0, args, nargs, kwnames);
}

static PyObject *agenda_call_later(Agenda *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return call_in(self, self->now, args, nargs, kwnames);
}

/* ---- running */

/* 1: kept for later, 0: to be run, -1: an error. Takes the reference when kept. */
static int keep_frozen(Agenda *self, Handle *handle) {
    PyObject *owner = PyObject_CallMethodOneArg(handle->context, name_get, self->owner);
    if (owner == NULL)
        return -1;
    PyObject *kept = PyDict_GetItemWithError(self->frozen, owner);
    Py_DECREF(owner);
    if (kept == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (PyList_Append(kept, (PyObject *)handle) < 0)
        return -1;
    Py_DECREF(handle);
    return 1;
}

/* As asyncio.Handle: what a callback raises is told, not raised. -1: it is no Exception, and goes on. */
static int tell_raised(Agenda *self) {
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *told = PyObject_CallOneArg(self->raised, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

/* 1: to the next moment, and what is due then is ready; 0: no timers; -1: an error. */
static int advance(Agenda *self) {
    while (self->timers_count > 0 && self->timers[0].handle->cancelled) {
        self->timers_cancelled--;
        Py_DECREF(timer_pop(self));
    }
    if (self->timers_count == 0)
        return 0;
    if (self->timers[0].when > self->now) {
        PyObject *now = PyFloat_FromDouble(self->timers[0].when);
        if (now == NULL)
            return -1;
        self->now = self->timers[0].when;
        Py_SETREF(self->now_object, now);
    }
    while (self->timers_count > 0 && self->timers[0].when <= self->now) {
        Handle *handle = timer_pop(self);
        if (handle->cancelled) {
            self->timers_cancelled--;
            Py_DECREF(handle);
        } else if (ready_push(self, handle) < 0)
            return -1;
    }
    return 1;
}

/* Takes the reference. -1: an exception that is none of asyncio.Handle's goes on. */
static int run_handle(Agenda *self, Handle *handle) {
    /* It may be cancelled, and lose these, while it runs. */
    PyObject *callback = Py_NewRef(handle->callback), *context = Py_NewRef(handle->context);
    PyObject *args = Py_XNewRef(handle->args), *value = NULL;
    if (PyContext_Enter(context) == 0) {
        value = args == NULL ? PyObject_CallNoArgs(callback)
                             : PyObject_Vectorcall(callback, ((PyTupleObject *)args)->ob_item,
                                                   PyTuple_GET_SIZE(args), NULL);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(value);
    }
    Py_DECREF(handle);
    Py_DECREF(callback);
    Py_DECREF(context);
    Py_XDECREF(args);
    if (value == NULL)
        return tell_raised(self);
    Py_DECREF(value);
    return 0;
}

static PyObject *agenda_live(Agenda *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "live(main, standstill, until)");
        return NULL;
    }
    long long standstill = PyLong_AsLongLong(args[1]), until = PyLong_AsLongLong(args[2]);
    if ((standstill == -1 || until == -1) && PyErr_Occurred())
        return NULL;
    long long limit = self->callbacks + standstill;
    for (;;) {
        PyObject *done = PyObject_CallMethodNoArgs(args[0], name_done);
        if (done == NULL)
            return NULL;
        Py_DECREF(done);
        if (done == Py_True)
            return PyUnicode_FromString("done");
        if (self->ready_count == 0) {
            if (self->callbacks >= until)
                return PyUnicode_FromString("pause");
            double moment = self->now;
            int found = advance(self);
            if (found < 0)
                return NULL;
            if (found == 0)
                return PyUnicode_FromString("deadlock");
            if (self->now > moment) {
                limit = self->callbacks + standstill;
                if (PyErr_CheckSignals() < 0)
                    return NULL;
            }
            continue;
        }
        if (self->callbacks >= limit)
            return PyUnicode_FromString("standstill");
        Handle *handle = ready_pop(self);
        if (handle->cancelled) {
            Py_DECREF(handle);
            continue;
        }
        if (PyDict_GET_SIZE(self->frozen) > 0) {
            int kept = keep_frozen(self, handle);
            if (kept > 0)
                continue;
            if (kept < 0) {
                Py_DECREF(handle);
                return NULL;
            }
        }
        self->callbacks++;
        if (run_handle(self, handle) < 0)
            return NULL;
    }
}

static PyObject *agenda_again(Agenda *self, PyObject *handles) {
    PyObject *list = PySequence_List(handles);
    if (list == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *handle = PyList_GET_ITEM(list, i);
        if (!Py_IS_TYPE(handle, HandleType)) {
            Py_DECREF(list);
            PyErr_SetString(PyExc_TypeError, "not a handle");
            return NULL;
        }
        if (ready_push(self, (Handle *)Py_NewRef(handle)) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    Py_DECREF(list);
    Py_RETURN_NONE;
}

static PyObject *agenda_upcoming(Agenda *self, PyObject *unused) {
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < self->ready_count; i++) {
        Handle *handle = self->ready[(self->ready_first + i) & (self->ready_room - 1)];
        if (handle->callback != NULL && PyList_Append(found, handle->callback) < 0)
            Py_CLEAR(found);
    }
    return found;
}

/* ---- the type */

static int agenda_traverse(Agenda *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->draw);
    Py_VISIT(self->owner);
    Py_VISIT(self->raised);
    Py_VISIT(self->frozen);
    for (Py_ssize_t i = 0; i < self->ready_count; i++)
        Py_VISIT(self->ready[(self->ready_first + i) & (self->ready_room - 1)]);
    for (Py_ssize_t i = 0; i < self->timers_count; i++)
        Py_VISIT(self->timers[i].handle);
    return 0;
}

static void forget_all(Agenda *self) {
    while (self->ready_count > 0)
        Py_DECREF(ready_pop(self));
    while (self->timers_count > 0) {
        Handle *handle = self->timers[--self->timers_count].handle;
        handle->agenda = NULL;
        Py_DECREF(handle);
    }
    self->timers_cancelled = 0;
}

static PyObject *agenda_clear_all(Agenda *self, PyObject *unused) {
    forget_all(self);
    Py_RETURN_NONE;
}

static int agenda_clear(Agenda *self) {
    forget_all(self);
    Py_CLEAR(self->draw);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->raised);
    Py_CLEAR(self->frozen);
    return 0;
}

static void agenda_dealloc(Agenda *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    agenda_clear(self);
    Py_CLEAR(self->now_object);
    PyMem_Free(self->ready);
    PyMem_Free(self->timers);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *agenda_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *draw, *owner, *raised;
    if (!PyArg_ParseTuple(args, "OOO", &draw, &owner, &raised))
        return NULL;
    Agenda *self = (Agenda *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->draw = Py_NewRef(draw);
    self->owner = Py_NewRef(owner);
    self->raised = Py_NewRef(raised);
    self->frozen = PyDict_New();
    self->now_object = PyFloat_FromDouble(0.0);
    if (self->frozen == NULL || self->now_object == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef agenda_members[] = {
    {"callbacks", T_LONGLONG, offsetof(Agenda, callbacks), READONLY, NULL},
    {"frozen", T_OBJECT_EX, offsetof(Agenda, frozen), READONLY, NULL},
    {NULL},
};

static PyMethodDef agenda_methods[] = {
    {"time", (PyCFunction)agenda_time, METH_NOARGS, NULL},
    {"call_soon", (PyCFunction)(void (*)(void))agenda_call_soon, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"call_at", (PyCFunction)(void (*)(void))agenda_call_at, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"call_later", (PyCFunction)(void (*)(void))agenda_call_later, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"live", (PyCFunction)(void (*)(void))agenda_live, METH_FASTCALL, NULL},
    {"again", (PyCFunction)agenda_again, METH_O, NULL},
    {"upcoming", (PyCFunction)agenda_upcoming, METH_NOARGS, NULL},
    {"clear", (PyCFunction)agenda_clear_all, METH_NOARGS, NULL},
    {NULL},
};

static PyType_Slot agenda_slots[] = {
    {Py_tp_new, agenda_new},
    {Py_tp_dealloc, agenda_dealloc},
    {Py_tp_traverse, agenda_traverse},
    {Py_tp_clear, agenda_clear},
    {Py_tp_methods, agenda_methods},
    {Py_tp_members, agenda_members},
    {0, NULL},
};

static PyType_Spec agenda_spec = {
    .name = "swarmnode_agenda.Agenda",
    .basicsize = sizeof(Agenda),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = agenda_slots,
};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "swarmnode_agenda", .m_size = -1};

PyMODINIT_FUNC PyInit_swarmnode_agenda(void) {
    name_done = PyUnicode_InternFromString("done");
    name_get = PyUnicode_InternFromString("get");
    name_context = PyUnicode_InternFromString("context");
    HandleType = (PyTypeObject *)PyType_FromSpec(&handle_spec);
    PyObject *agenda = PyType_FromSpec(&agenda_spec), *module = PyModule_Create(&module_def);
    if (!name_done || !name_get || !name_context || !HandleType || !agenda || !module)
        return NULL;
    if (PyModule_AddObjectRef(module, "Agenda", agenda) < 0)
        Py_CLEAR(module);
    Py_DECREF(agenda);
    return module;
}
