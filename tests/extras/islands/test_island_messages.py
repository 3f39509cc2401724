from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.extras.islands.island_messages import Member, View

MEMBERS = st.lists(
    st.builds(Member, st.text("ab:-", max_size=4), st.text("ab:-", max_size=4), st.just("x:1")),
    max_size=4,
    unique_by=lambda member: member.name,
)


@given(MEMBERS, st.randoms())
def test_a_view_does_not_depend_on_the_order_in_which_members_are_told(members, random):  # type: ignore[no-untyped-def]
    assert View.of(random.sample(members, len(members))) == View.of(members)


@given(MEMBERS, MEMBERS)
def test_views_have_one_key_if_and_only_if_names_and_processes_agree(one, other):
    def who(members: list[Member]) -> set[tuple[str, str]]:
        return {(member.name, member.process) for member in members}

    assert (View.of(one).key == View.of(other).key) == (who(one) == who(other))


def test_an_address_is_not_part_of_the_key_but_a_new_process_is():
    member = Member("garage", "1", "10.0.0.1:1")
    moved = dataclasses.replace(member, address="10.0.0.2:1")
    again = dataclasses.replace(member, process="2")
    assert View.of([member]).key == View.of([moved]).key
    assert View.of([member]).key != View.of([again]).key
