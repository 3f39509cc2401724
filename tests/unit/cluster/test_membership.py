from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.cluster.membership import (
    MAX_RECOVERIES,
    TABLE,
    Action,
    Event,
    Membership,
    WorkerState,
)

START = [Event.DIAL, Event.FRESH, Event.PLANNED, Event.LOADED]
EVENTS = st.lists(st.tuples(st.sampled_from([1, "box"]), st.sampled_from(list(Event))), max_size=60)


def after(*events: Event) -> Membership:
    members = Membership([1])
    for event in events:
        members.on(1, event)
    return members


def test_worker_is_dialled_set_up_and_started():
    members = Membership([1])
    assert [members.on(1, event) for event in START] == [(), (), (Action.SET_UP,), ()]
    assert members._states[1] is WorkerState.READY


def test_link_that_blinks_costs_nothing_while_stages_load():
    members = after(*START[:3])
    assert members.on(1, Event.LINK_LOST) == (Action.DIAL,)
    assert members.on(1, Event.FRESH) == (Action.SET_UP,)
    assert members._states[1] is WorkerState.LOADING


def test_worker_that_comes_back_with_its_stages_goes_on():
    members = after(*START)
    assert members.on(1, Event.LINK_LOST) == (Action.DIAL,)
    assert members.on(1, Event.BACK) == (Action.REPEAT_COMMIT,)
    assert members._states[1] is WorkerState.READY


def test_worker_that_comes_back_in_a_new_process_joins_again():
    members = after(*START, Event.LINK_LOST)
    assert members.on(1, Event.FRESH) == (Action.REJOIN,)
    assert members.those(WorkerState.JOINING) == [1]
    assert members.on(1, Event.PLANNED) == (Action.SET_UP,)


def test_worker_that_does_not_come_back_ends_the_run():
    members = after(*START, Event.LINK_LOST)
    assert members.on(1, Event.GONE) == (Action.GIVE_UP,)
    assert members._states[1] is WorkerState.LEFT


@pytest.mark.parametrize(
    ("event", "action"), [(Event.GONE, Action.GIVE_UP), (Event.LEAVING, Action.HAND_OVER)]
)
def test_worker_that_has_left_may_be_replaced(event, action):
    members = after(*START)
    assert members.on(1, event) == (action,)
    for event in START:
        members.on(1, event)
    assert members._states[1] is WorkerState.READY


def test_link_that_breaks_too_often_in_one_step_counts_as_gone():
    members = after(*START)
    for _ in range(2):
        for _ in range(MAX_RECOVERIES):
            assert members.on(1, Event.LINK_LOST) == (Action.DIAL,)
            members.on(1, Event.BACK)
        members.settled()
    for _ in range(MAX_RECOVERIES):
        members.on(1, Event.LINK_LOST)
        members.on(1, Event.BACK)
    assert members.on(1, Event.LINK_LOST) == (Action.GIVE_UP,)


@given(EVENTS)
def test_membership_follows_its_table_for_any_events(events):
    members = Membership([1, "box"])
    for worker, event in events:
        state = members._states[worker]
        actions = members.on(worker, event)
        after = members._states[worker]
        too_often = event is Event.LINK_LOST and members.losses(worker) > MAX_RECOVERIES
        assert (after, actions) == TABLE[state, Event.GONE if too_often else event]
        # Somebody is given up exactly when he is found to be gone; nobody comes back by himself
        # to do more than wait for layers.
        assert (Action.GIVE_UP in actions) <= (after is WorkerState.LEFT)
        waits = after in (WorkerState.LEFT, WorkerState.SPARE)
        assert state is not WorkerState.LEFT or waits or event is Event.DIAL
        assert Action.REJOIN not in actions or after is WorkerState.JOINING


def test_stages_take_part_only_when_loaded_or_kept():
    ready, loaded = WorkerState.READY, (WorkerState.LOADING, Event.LOADED)
    begins = {key for key, (after, _) in TABLE.items() if after is ready and key[0] is not ready}
    assert begins == {loaded, (WorkerState.LOST, Event.BACK)}


def test_every_event_in_every_state_is_in_the_table():
    assert TABLE.keys() == {(state, event) for state in WorkerState for event in Event}


def test_a_worker_that_leaves_before_loading_changes_nothing():
    for state in (WorkerState.JOINING, WorkerState.LOADING):
        assert TABLE[state, Event.LEAVING] == (state, ())
        assert TABLE[state, Event.LINK_LOST] == (state, (Action.DIAL,))


def test_every_state_goes_to_joining_when_dialled():
    assert {TABLE[state, Event.DIAL] for state in WorkerState} == {(WorkerState.JOINING, ())}


def test_the_loss_of_a_worker_without_layers_holds_up_no_step():
    members = after(*START[:3])
    assert members.on(1, Event.SPARED) == ()
    for lost in (Event.LINK_LOST, Event.LEAVING, Event.GONE):
        assert members.on(1, lost) == (Action.AWAIT,)
        assert members.state(1) is WorkerState.LEFT
        assert members.on(1, Event.BACK) == ()
        assert members.state(1) is WorkerState.SPARE
    assert members.on(1, Event.PLANNED) == (Action.SET_UP,)


def test_a_broken_link_is_redialled_or_given_up_in_every_state():
    for state in WorkerState:
        if state in (WorkerState.ABSENT, WorkerState.SPARE):
            continue
        _, actions = TABLE[state, Event.LINK_LOST]
        assert actions in ((Action.DIAL,), (Action.GIVE_UP,))
        assert TABLE[state, Event.GONE] == (WorkerState.LEFT, (Action.GIVE_UP,))
