// A thread pool. Threads take tasks from an atomic counter. The caller also takes tasks, and at the end waits only for
// helpers that have started: a helper that the system does not schedule delays nobody. OpenMP is not used because it
// waits for every thread of a team, and hangs after a fork.
//
// Waking a thread takes tens of microseconds, as long as a short call. Threads therefore spin for PATIENCE before they
// sleep: the caller while it waits for helpers, and helpers if the last call came soon after the one before.
#pragma once

#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

class Pool {
  public:
    // Run task(index, worker) for each index below `count`, on at most `threads` workers that take `grain` indices at a
    // time. Runs on the calling thread alone if another call uses the pool.
    template <class Task> static void run(int64_t count, int threads, const Task& task, int64_t grain = 1) {
        Pool& pool = current();
        std::unique_lock<std::mutex> turn(pool.turn, std::defer_lock);
        if (count > 1 && threads > 1 && turn.try_lock()) {
            auto call = [](const void* f, int64_t i, int worker) { (*(const Task*)f)(i, worker); };
            pool.share(count, threads, call, &task, grain);
        } else {
            for (int64_t i = 0; i < count; i++) task(i, 0);
        }
    }

  private:
    struct Job {
        void (*call)(const void*, int64_t, int);
        const void* task;
        int64_t count, grain;
        std::atomic<int64_t> next{0};
        std::atomic<int> working{0};  // helpers that have started and are not done

        void work(int worker) {
            for (int64_t i; (i = next.fetch_add(grain)) < count;)
                for (int64_t stop = i + grain < count ? i + grain : count; i < stop; i++) call(task, i, worker);
        }
    };

    std::mutex turn;  // held by the call that uses the helpers
    std::mutex mutex;
    std::condition_variable wake, idle;
    Job* job = nullptr;
    std::atomic<int> seats{0};  // helpers that may still join the job
    int helpers = 0;

    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds PATIENCE{100};

    // Spin until the condition holds, at most for PATIENCE
    template <class Condition> static void await(Condition is_so) {
        for (const auto stop = Clock::now() + PATIENCE; !is_so() && Clock::now() < stop;) _mm_pause();
    }

    static Pool*& instance() {
        static Pool* pool = nullptr;
        return pool;
    }

    static Pool& current() {
        // a forked child has no helpers, and its copies of the locks may be held: give it a new pool
        static const bool ready = [] {
            instance() = new Pool;
            pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
            return true;
        }();
        (void)ready;
        return *instance();
    }

    void share(int64_t count, int threads, void (*call)(const void*, int64_t, int), const void* task, int64_t grain) {
        Job mine{call, task, count, grain};
        {
            std::lock_guard<std::mutex> lock(mutex);
            try {
                for (; helpers < threads - 1; helpers++) std::thread(&Pool::help, this).detach();
            } catch (const std::system_error&) {  // thread limit of the process reached: use the threads there are
            }
            job = &mine;
            seats = threads - 1 < count - 1 ? threads - 1 : int(count - 1);
        }
        wake.notify_all();
        mine.work(0);
        std::unique_lock<std::mutex> lock(mutex);
        job = nullptr;
        seats = 0;
        lock.unlock();
        await([&] { return mine.working == 0; });
        lock.lock();
        idle.wait(lock, [&] { return mine.working == 0; });
    }

    void help() {
        for (bool often = false;;) {
            const auto start = Clock::now();
            if (often) await([&] { return seats > 0; });
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&] { return seats > 0; });
            often = Clock::now() - start < PATIENCE;
            Job* mine = job;
            int worker = seats--;
            mine->working++;
            lock.unlock();
            mine->work(worker);
            lock.lock();
            if (--mine->working == 0) idle.notify_all();
        }
    }
};
