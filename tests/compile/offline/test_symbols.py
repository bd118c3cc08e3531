"""What the wheel wants of CANN, and stand-ins for symbols of every kind, on small libraries made
here.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion.compile.offline import standins, symbols
from mla_fusion.compile.offline.symbols import Missing, OfflineError, Wheel

CPP = """
namespace cann { struct Base { virtual ~Base(); virtual int run(); }; extern int table[4];
int call(const Base &); } extern "C" int cann_open(void); extern "C" { extern __thread int
cann_state; } struct Derived : cann::Base {}; extern "C" int use() {
cann::Base *base = new cann::Base();
return cann::table[0] + cann_open() + cann::call(*base) + cann_state; }
"""


def make_wheel(root: Path, text: str = CPP, version: str = "1.0") -> Wheel:
    """A wheel of one library that needs a library which will not be there."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "want.cpp").write_text(text)
    (root / "cann.c").write_text("int unused;")
    absent = root / "absent"
    absent.mkdir(exist_ok=True)
    soname = "-Wl,-soname,libcannfake.so"
    run("gcc", "-shared", "-fPIC", soname, "-o", absent / "libcannfake.so", root / "cann.c")
    command = ["g++", "-shared", "-fPIC", "-o", root / "libwant.so", root / "want.cpp"]
    run(*command, "-Wl,--no-as-needed", absent / "libcannfake.so", "-Wl,-soname,libwant.so")
    (absent / "libcannfake.so").unlink()
    return Wheel(version, root, (root / "libwant.so",))


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def test_finds_functions_objects_and_thread_locals(tmp_path: Path) -> None:
    missing = symbols.find_missing(make_wheel(tmp_path))
    assert "cann_open" in missing.functions
    assert "_ZN4cann4callERKNS_4BaseE" in missing.functions
    assert missing.thread_locals == ("cann_state",)
    assert set(missing.objects) == {"_ZN4cann5tableE", "_ZTVN4cann4BaseE"}
    assert missing.libraries == ("libcannfake.so",)


def test_stand_ins_satisfy_the_loader(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    standins.build(symbols.find_missing(wheel), tmp_path, "cc")
    # In a process of its own: this one may have the stand-ins of torch_npu under the same names.
    # The library is asked for a symbol too, as torch_npu does with dlsym, and the wheel's code
    # calls through them.
    code = f"""
import ctypes
for name in ("{standins.SYMBOLS}", "libcannfake.so"):
    library = ctypes.CDLL("{tmp_path}/" + name, mode=ctypes.RTLD_GLOBAL)
print(library.cann_open(), ctypes.CDLL("{wheel.libraries[0]}").use())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr


def test_type_information_has_a_shape_that_cxx_can_follow() -> None:
    text = standins.source(Missing((), (), ("_ZTIN4cann4BaseE", "_ZTVN4cann4BaseE"), ()))
    assert "_ZTVN10__cxxabiv117__class_type_infoE" in text
    assert "(void *)mla_fusion_inert" in text


def test_fingerprint_follows_the_symbols(tmp_path: Path) -> None:
    first = symbols.fingerprint(make_wheel(tmp_path / "a"))
    assert first == symbols.fingerprint(make_wheel(tmp_path / "b"))
    changed = CPP.replace("cann_open", "cann_close")
    assert first != symbols.fingerprint(make_wheel(tmp_path / "c", changed))
    assert first != symbols.fingerprint(make_wheel(tmp_path / "d", version="1.1"))


@pytest.mark.parametrize("version", ["2.12.0", "2.13.1", "2.9.0.post4"])
def test_other_torch_version_is_refused(version: str) -> None:
    with pytest.raises(
        OfflineError,
        match=r"was built for torch .* pip install torch==2\.13\.0 "
        r"torch_npu==2\.13\.0",
    ):
        symbols.check_versions(Wheel(version, Path("."), ()), "2.13.0+cpu")


@pytest.mark.parametrize("version", ["2.13.0.post1", "2.13.0rc1", "2.13.0.dev20261101"])
def test_releases_of_the_same_version_pass(version: str) -> None:
    symbols.check_versions(Wheel(version, Path("."), ()), "2.13.0+cpu")


def test_a_build_without_metadata_is_refused() -> None:
    with pytest.raises(OfflineError, match="'unknown' is no version"):
        symbols.check_versions(Wheel("unknown", Path("."), ()), "2.13.0")


def test_absent_torch_npu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "find_spec", lambda name: None)
    with pytest.raises(OfflineError, match="torch_npu is not installed"):
        symbols.find_wheel()
