"""The references of commands, of a job's fields and of the library are whole, and their examples are valid."""

from __future__ import annotations

import re

import pytest
import yaml

from headrace import errors
from headrace.cli.main import COMMANDS
from headrace.spec import JobSpec, parse_spec
from headrace.user_document import SpecSection
from website import command_reference, job_reference, python_reference
from website.command_reference import Command
from website.headings import anchors
from website.prose import definition, escaped, paragraphs

SELF_EXPLAINING = {"job", "jobs", "spec", "from_step"}
"""Arguments that may go without words: of `headrace job ACTION`."""


@pytest.fixture(scope="module")
def commands() -> list[Command]:
    return list(command_reference.flat(command_reference.commands()))


def test_every_command_and_every_argument_is_described(commands: list[Command]) -> None:
    names = [command.name.split() for command in commands]
    assert [name[1] for name in names if len(name) == 2] == list(COMMANDS)
    assert ["headrace", "job", "submit"] in names
    silent = [
        f"{command.name}: {action.dest}"
        for command in commands
        for action in command_reference.arguments(command.parser)
        if not action.help and action.dest not in SELF_EXPLAINING
    ]
    assert silent == []
    assert [command.name for command in commands if not command.line] == []


def test_the_page_of_commands_has_each_option_and_example(commands: list[Command]) -> None:
    page = command_reference.page()
    assert anchors(page) >= {command.name.removeprefix("headrace ").replace(" ", "-") for command in commands}
    for command in commands:
        for action in command_reference.arguments(command.parser):
            assert all(option in page for option in action.option_strings)
        lines = (command.parser.epilog or "").strip("\n").splitlines()
        assert not lines or lines[-1].lower() in page.replace("\\", "").lower()
    assert "`--strategy" in page
    assert "==SUPPRESS==" not in page
    assert "headrace job weights --from-step N [options]" in page


def test_every_field_of_a_job_is_described() -> None:
    sections = job_reference.sections()
    assert [f"{one.model.__name__}.{field.name}" for one in sections for field in one.fields if not field.description] == []
    assert [one.model.__name__ for one in sections if not one.model.__doc__] == []
    reached = {one.model for one in sections}
    assert {
        kind for kind in _kinds(SpecSection) if kind.__module__.startswith("headrace.") and ".trainer." not in kind.__module__
    } <= reached
    assert {one.path for one in sections} >= {"", "sources[]", "sources[].mapping", "execution.units.NAME", "validation.NAME"}


def _kinds(kind: type) -> set[type]:
    below = kind.__subclasses__()
    return {*below, *(further for one in below for further in _kinds(one))}


def test_the_page_of_fields_says_what_they_may_be() -> None:
    page = job_reference.page()
    for said in (
        "`window`\n:   *whole number at least 1 and at most 1,024, default `4`*",
        "`name`\n:   *text like `^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`, required*",
        "`lambda`\n:   *number at least 0, default `0.0`*",
        "`topology`\n:   *[section](#topology)*",
        "`validation`\n:   *names with a value each: [section](#validation-name), default `{}`*",
        '`schedule`\n:   *text, default `"1f1b"`*',
        "*list of one or more, each: [section](#sources), required*",
        "*`true` or `false` or `auto`, default `false`*",
    ):
        assert said in page
    assert {"job", "topology", "sources", "execution-units-name"} <= anchors(page)


def test_the_examples_of_the_page_are_valid_and_one_job() -> None:
    shortest, whole = (
        parse_spec(yaml.safe_load(text)) for text in re.findall(r"```yaml\n(.*?)```", job_reference.page(), re.DOTALL)
    )
    assert shortest == whole
    assert set(whole.model_dump()) == set(JobSpec.model_fields)


def test_every_name_of_the_library_is_found_and_described() -> None:
    found = [thing for room in python_reference.ROOMS for thing in python_reference.things(room)]
    names = {thing.anchor for thing in found}
    assert {"headrace.trainer.connect", "headrace.trainer.StepLoader", "headrace.jobs.Jobs", "headrace.ray.submit"} <= names
    page = python_reference.page()
    assert names | {"headrace.trainer.StepLoader.commit", "headrace.jobs.Jobs.show"} <= anchors(page)
    assert "`num_targets: int`\n:   Number of targets of the whole global batch" in page
    assert "```python\ncommit(step: Step, *, loss: float = math.nan) -> None\n```" in page


def test_every_error_and_every_name_of_the_trainer_is_in_the_reference() -> None:
    raised = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.HeadraceError)}
    assert raised - {"SupersededLeaderError"} == set(python_reference.ERRORS)
    everything = python_reference.things(python_reference.Room("headrace.trainer", ""))
    assert {thing.node.name for thing in everything} == set(python_reference.TRAINER)


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(LookupError, match=r"headrace.jobs has no Jobz"):
        python_reference.things(python_reference.Room("headrace.jobs", "", ("Jobz",)))


def test_plain_text_stays_plain() -> None:
    assert escaped("2 * <b> of `a*b` and snake_case, _x_ [1]") == r"2 \* &lt;b&gt; of `a*b` and snake_case, \_x\_ \[1\]"
    assert paragraphs("One *a*.\n\n    code * code\n\nTwo.") == "One \\*a\\*.\n\n    code * code\n\nTwo."
    assert definition("`--x`", "One.\n\nTwo.") == "`--x`\n:   One.\n\n    Two.\n\n"
