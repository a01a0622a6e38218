// The exported functions of the library. Each returns 0, or 1 if memory could not be allocated.
#include "bidirectional.h"
#include "causal.h"

template <class F> static int by_dtype(const Call& call, F f) {
    try {
        switch (call.dtype) {
            case 0: f(float()); break;
            case 1: f(double()); break;
            default: f(bfloat16());
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int bidirectional_forward(const Call* call) {
    return by_dtype(*call, [&](auto x) { Bidirectional<decltype(x)>(*call).run(false); });
}

extern "C" int bidirectional_backward(const Call* call) {
    return by_dtype(*call, [&](auto x) { Bidirectional<decltype(x)>(*call).run(true); });
}

extern "C" int causal_forward(const Call* call) {
    return by_dtype(*call, [&](auto x) { Causal<decltype(x)>(*call).run(false); });
}

extern "C" int causal_backward(const Call* call) {
    return by_dtype(*call, [&](auto x) { Causal<decltype(x)>(*call).run(true); });
}
