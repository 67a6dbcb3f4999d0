"""A signal asks for a stop; the next one does not ask."""

import signal
import subprocess
import sys
import textwrap

import pytest

TWICE = """
def twice(first, second):
    os.kill(os.getpid(), first)
    while not stop._first_at:
        time.sleep(0.01)
    time.sleep(1.05)
    os.kill(os.getpid(), second)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    script = "import os, signal, sys, time\nfrom automodel_ckpt.parallel.ranks.stop import stop_request\n"
    script += "stop = stop_request()\nstop.install()\n" + TWICE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


def test_signals_that_come_together_are_one_request_and_the_first_counts() -> None:
    done = run("""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        time.sleep(0.3)
        print(signal.Signals(stop.requested).name)
    """)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\n")


def test_a_second_signal_ends_the_process_at_once_while_the_main_thread_waits() -> None:
    done = run("""
        import threading
        stop.on_immediate_end = lambda number: print("last words", number, flush=True)
        threading.Thread(target=twice, args=(signal.SIGTERM, signal.SIGINT)).start()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    """)
    assert (done.returncode, done.stdout) == (
        128 + signal.SIGINT,
        f"last words {int(signal.SIGINT)}\n",
    )


def test_a_second_signal_ends_a_wait_after_the_save_and_not_the_process() -> None:
    done = run("""
        assert stop.seconds_since_request == 0
        stop.on_immediate_end = lambda number: print("not called")
        with stop.waiting() as is_repeated:
            twice(signal.SIGTERM, signal.SIGTERM)
            is_repeated.wait(100)
        print(is_repeated.is_set(), stop.seconds_since_request > 1)
    """)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


@pytest.mark.parametrize(
    "wait", ["time.sleep(100)", "os.read(os.pipe()[0], 1)", "threading.Lock().acquire()"]
)
def test_a_wait_for_data_is_ended_by_a_signal_and_by_another_ranks(wait: str) -> None:
    done = run(f"""
        import threading
        from automodel_ckpt.parallel.ranks.stop import StoppedWaiting, WAKE
        signal.signal(WAKE, stop.wake)
        threading.Timer(0.2, stop.interrupt if {wait!r}[0] == "t" else lambda: os.kill(os.getpid(), 15)).start()
        lock = threading.Lock()
        lock.acquire()
        try:
            with stop.interrupting():
                {wait.replace("threading.Lock()", "lock")}
        except StoppedWaiting:
            print("stopped")
        try:
            with stop.interrupting():
                print("not reached")
        except StoppedWaiting:
            print("stopped immediately")
    """)
    assert (done.returncode, done.stdout) == (0, "stopped\nstopped immediately\n"), done.stderr


def test_a_forked_workers_signals_are_not_the_processs() -> None:
    done = run("""
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        time.sleep(0.2)
        print(os.WTERMSIG(status), stop.requested)
    """)
    assert done.stdout == f"{int(signal.SIGTERM)} 0\n"


def test_signals_after_the_work_is_done_change_no_exit_code() -> None:
    done = run("""
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1.2)
        stop.finished = True
        for signal_number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signal_number)
            time.sleep(0.2)
        sys.exit(75)
    """)
    assert (done.returncode, done.stderr) == (75, "")


def test_an_interruption_inside_a_finalizer_is_repeated_outside_and_prints_nothing() -> None:
    done = run("""
        import weakref
        from automodel_ckpt.parallel.ranks.stop import StoppedWaiting

        class Slow:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                print("not reached")

        class Referred:
            pass

        def callback(reference):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

        try:
            with stop.interrupting():
                Slow()
                time.sleep(100)
        except StoppedWaiting:
            print("stopped")
        stop.requested, stop._first_at = 0, 0.0
        referred = Referred()
        reference = weakref.ref(referred, callback)
        try:
            with stop.interrupting():
                del referred
                time.sleep(100)
        except StoppedWaiting:
            print("stopped again")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\nstopped again\n", "")
