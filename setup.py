"""Puts the C kernel of AdamW into wheels, compiled for all instruction sets; the rest is in pyproject.toml.

Without a compiler, or where it fails, the wheel has no library: the kernel is then compiled at its first use, or torch
updates instead.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from mobius.engine.adamw_build import INSTRUCTION_SETS, PACKAGED, SOURCE, build_for_all


class BuildWithLibrary(build_py):
    """Copies the package and compiles the library next to the copy of adamw.c."""

    def run(self) -> None:
        """Build; a library that cannot be compiled is left out, with a warning."""
        super().run()
        machine, compiler = platform.machine(), shutil.which("cc")
        if self.editable_mode or sys.platform != "linux" or machine not in INSTRUCTION_SETS:
            return
        library = built_library(self.build_lib)
        library.unlink(missing_ok=True)  # of an earlier build
        try:
            if compiler is None:
                raise OSError("there is no C compiler (`cc`)")
            build_for_all(compiler, library, machine=machine)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"{PACKAGED.name} is left out, {SOURCE.name} will be compiled at its first use: {error}")


class WheelOfPlatform(bdist_wheel):
    """Tagged for any Python on this platform if it has the library, else for any platform."""

    def run(self) -> None:
        """Build first, because the tag depends on what was built."""
        self.run_command("build")
        if built_library(self.get_finalized_command("build").build_lib).is_file():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # installs where packages with machine code belong
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform: ctypes loads the library, so every Python can."""
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def built_library(build_lib: str) -> Path:
    """Path of the library in the folder of a build."""
    return Path(build_lib, *SOURCE.parts[-3:-1], PACKAGED.name)


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelOfPlatform})
