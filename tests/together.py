"""Many drafters in one engine: each request is drafted for by one of them, and one forward of the target scores all.

A drafter is asked about its own requests together, and shown what it asks for, as in an engine of its own.
"""

from slipstream import Drafter, DraftSession
from slipstream.drafters import _capabilities as can
from slipstream.drafters.base import Seen


class Together(Drafter):
    """pairs: requests, and who drafts for each."""

    def __init__(self, target, pairs):
        super().__init__(target, None, None)
        self.whose = {id(request): drafter for request, drafter in pairs}
        self.drafters = list(dict.fromkeys(drafter for _, drafter in pairs))
        self.layers = tuple(sorted({layer for drafter in self.drafters for layer in can.layers(drafter)}))
        self.shared = max(map(can.shared, self.drafters))
        self.rereads = None
        self._alike = {}  # the session that each drafter has begun for each prompt
        self._asked = {}  # about the step that was proposed last: which of its sequences are whose

    def begin(self, request):
        drafter = self.whose[id(request)]
        own = Own(drafter, drafter.begin(request))
        own.alike = self._alike.setdefault((drafter, tuple(request.tokens)), own)
        # The engine asks behind this, for this sequence. Who reads a prompt for the second time reads it from a copy.
        self.rereads = None if own.alike is own else can.rereads(drafter)
        return own

    def propose(self, sessions, roots, budgets):
        self._asked = {}
        for i, session in enumerate(sessions):
            self._asked.setdefault(session.drafter, []).append(i)
        found = {}
        for drafter, own in self._asked.items():
            given = [sessions[i].session for i in own], [roots[i] for i in own], [budgets[i] for i in own]
            found.update(zip(own, drafter.propose(*given), strict=True))
        return [found[i] for i in range(len(sessions))]

    def measured(self, rows, forward, host=0.0):
        for drafter, own in self._asked.items():
            share = len(own) / len(rows)
            can.measured(drafter, [rows[i] for i in own], share * forward, share * host)

    def attach(self, answers):
        for drafter in self.drafters:
            can.attach(drafter, answers)

    def ended(self, request, tokens):
        can.ended(self.whose[id(request)], request, tokens)


class Own(DraftSession):
    """A session of one of the drafters. alike: its first one for the same prompt, or this one."""

    def __init__(self, drafter, session):
        self.drafter, self.session = drafter, session

    def observe(self, seen):
        self.session.observe(Seen(seen.tokens, seen.position, seen.hidden.of(can.layers(self.drafter))))

    def propose(self, root, budget):
        return self.session.propose(root, budget)

    def choices(self, tree, chosen):
        can.choices(self.session, tree, chosen)

    def keep(self):
        can.keep(self.session)

    def pause(self):
        can.pause(self.session)

    def follow(self, slot):
        can.follow(self.session, slot)

    def resume(self, other, tokens):  # noqa: ARG002
        """Keys are copied from any text with this prompt; what a drafter knows is taken over from its own."""
        can.resume(self.session, self.alike.session, tokens)

    def close(self):
        self.session.close()
