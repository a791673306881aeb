"""Make students before training: from layers of the teacher, a named size, a model folder, or words and tokens.

`runs.distil.run`, `runs.distil.mlm` and `runs.distil.search` call `build_student`. This module also resolves the
settings of losses to layers of a student and a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import floor

from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, assign, config_of, create, load, read_config
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError, ModelError, did_you_mean
from heedful.families import DEFAULT_FAMILIES, FAMILIES
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import (
    Learned,
    MaskedTokens,
    ModelConfig,
    SentenceEmbedding,
    Shaw,
    StackConfig,
    TransformerXl,
)
from heedful.model.initialise import skip_init
from heedful.objectives.distillation.objective import DistillationLosses, HiddenStateLoss, RelationLoss
from heedful.runs.distil.settings import (
    ClassicStudent,
    FolderStudent,
    LayersStudent,
    LossSettings,
    RelationsSettings,
    SizeStudent,
    StatesSettings,
    StaticStudent,
    StudentSettings,
)
from heedful.runs.distil.static import static_student
from heedful.runs.finetune.build import evenly_spaced
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import ClassicInit
from heedful.runs.pretrain.build import config_of_size, first_published_config, with_dropout
from heedful.runs.pretrain.settings import ModelSettings, PretrainSettings
from heedful.tasks.answering import require_tokenizer

MAX_LENGTH = 512  # maximum tokens of a student with random weights, unless the teacher's maximum is less


def build_student(
    settings: StudentSettings,
    teacher: ModelBundle,
    texts: Sequence[str],
    *,
    max_length: int | None,
    seed: int,
    log: Callable[[str], None],
) -> ModelBundle:
    """Make or load the student.

    Args:
        settings: The kind of student and its shape.
        teacher: The teacher. A student that has its layers also has its head.
        texts: Texts that determine the vocabulary of a classic student, or the vectors of a static one.
        max_length: Maximum tokens of a student of a named size. If None, the teacher's maximum, up to MAX_LENGTH.
        seed: Random seed of initial weights.
        log: Receives progress messages.

    Raises:
        HeedfulError: If this kind of student cannot be made from the teacher.
    """
    match settings:
        case LayersStudent():
            return student_from_layers(teacher, settings)
        case SizeStudent():
            return student_of_size(teacher, settings, max_length, seed)
        case FolderStudent(model=model, revision=revision):
            return load(model, revision=revision or None)
        case StaticStudent():
            return static_student(teacher, settings, texts, log)
        case ClassicStudent(reader=reader, words=words, skipgram_steps=steps):
            init = ClassicInit(reader=reader, words=words, skipgram_steps=steps)
            try:
                return classic_model(init, list(evenly_spaced(texts, len(texts))), seed, log, all_texts=texts)
            except HeedfulError as error:  # its message names settings of fine-tuning, such as init.words
                message = str(error).replace("init.", "student.")
                raise HeedfulError(message) from None


def single_stack(config: ModelConfig) -> StackConfig | None:
    """Return the stack of a model that has exactly one, else None."""
    if type(config) is ClassicConfig or (config.encoder is None) == (config.decoder is None):
        return None
    return config.encoder or config.decoder


def require_single_stack(model: ModelBundle) -> StackConfig:
    """Return the only stack of Transformer layers of a model.

    Raises:
        HeedfulError: If the model has an encoder and a decoder, or no stack.
    """
    stack = single_stack(model.config.model)
    if stack is None:
        raise HeedfulError(
            f"{model.source} ({model.config.family}) does not have a single stack of Transformer layers, which "
            "students of some layers and losses of states and relations need: choose a student of a size or in a "
            'folder, and the loss "logits"'
        )
    return stack


# -- students from layers of the teacher --------------------------------------------------------------------------


def evenly_spread(layers: int, count: int) -> tuple[int, ...]:
    """Return indices of evenly spaced layers from the first to the last, or only the first if `count` is 1.

    >>> evenly_spread(12, 6), evenly_spread(6, 3), evenly_spread(4, 1)
    ((0, 2, 4, 7, 9, 11), (0, 3, 5), (0,))
    """
    return tuple(floor(n * (layers - 1) / max(1, count - 1) + 0.5) for n in range(count))


def _is_local(stack: StackConfig, layer: int) -> bool:
    """Tell whether the layer with this index has local attention."""
    return stack.window_of(layer) is not None


def _matching_layers(stack: StackConfig, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the teacher's layers, in increasing order, that are nearest to `wanted` and match the student's layers.

    The student has the teacher's pattern of local and global attention. A layer of the teacher matches a position in
    the student if both have local attention, or both have global attention.
    """
    period = (stack.global_every or 1) if stack.window is not None else 1
    is_irregular = stack.global_layers is not None
    # a chosen layer is at most this far above its position, so that layers remain that match the later positions
    max_shift = 0 if is_irregular else (stack.layers - len(wanted)) // period * period
    chosen: list[int] = []
    for position, layer in enumerate(wanted):
        first = chosen[-1] + 1 if chosen else 0
        candidates = [
            candidate
            for candidate in range(first, position + max_shift + 1)
            if _is_local(stack, candidate) == _is_local(stack, position)
        ]
        chosen.append(min(candidates, key=lambda candidate: (abs(candidate - layer), candidate)))
    return tuple(chosen)


def student_from_layers(teacher: ModelBundle, settings: LayersStudent) -> ModelBundle:
    """Copy layers of the teacher, its embedding and its head into a student.

    If the settings name another family, the student has that family's config, and only a masked-LM head is copied.

    Raises:
        HeedfulError: If the teacher lacks a layer, or the layers cannot be in this order or family.
    """
    model, stack = teacher.config.model, require_single_stack(teacher)
    layers = _choose_layers(settings, stack, teacher.source)
    shares_weights = stack.blocks is not None and stack.blocks < stack.layers
    blocks = list(layers)  # the blocks to copy: one for each layer, or the first ones if layers share blocks
    if shares_weights:
        blocks = list(range(min(stack.blocks or 1, len(layers))))
    stack_name = "encoder" if model.encoder is not None else "decoder"
    student_stack = replace(stack, layers=len(layers), blocks=len(blocks) if shares_weights else None)
    if stack_name == "encoder":
        student_model = replace(model, encoder=student_stack)
    else:
        student_model = replace(model, decoder=student_stack)
    config = BundleConfig(family=teacher.config.family, model=student_model, head=teacher.config.head)
    if settings.family not in ("", config.family):
        config = _in_family(settings.family, config)
    with skip_init():
        student = ModelBundle(config, teacher.tokenizer, teacher.source)
    teacher_tensors = teacher.named_tensors()
    if config.head is None and isinstance(teacher.config.head, MaskedTokens):
        # another family, whose masked-LM head has the same tensors: make it here, so that they are copied too
        assign(student, _copied_tensors(student, teacher_tensors, stack_name, blocks, stack), "cpu")
        student = with_head(student, "masked_lm")
    tensors = _copied_tensors(student, teacher_tensors, stack_name, blocks, stack)
    if config.model.embedding.types == 0 < model.embedding.types and "embedding.positions.weight" in tensors:
        # a family without token types: the vector of type 0 is part of each position's vector
        tensors["embedding.positions.weight"] += teacher_tensors["embedding.types.weight"].detach()[0]
    assign(student, tensors, "cpu")
    student.thresholds, student.text_suffix = dict(teacher.thresholds), teacher.text_suffix
    student.source = f"layers {' '.join(map(str, layers))} of {teacher.source}"
    return student.eval()


def _choose_layers(settings: LayersStudent, stack: StackConfig, teacher_name: str) -> tuple[int, ...]:
    """Return the layers of the teacher to copy: those that the settings name, else evenly spaced ones.

    Raises:
        HeedfulError: If the teacher lacks a layer, or a layer with local attention would become a global one.
    """
    if settings.layers > stack.layers:
        raise HeedfulError(
            f"layers is {settings.layers}, but {teacher_name} has {stack.layers}: give a number from 1 to "
            f"{stack.layers}"
        )
    layers = settings.teacher_layers or _matching_layers(stack, evenly_spread(stack.layers, settings.layers))
    if wrong := [layer for layer in layers if not 0 <= layer < stack.layers]:
        raise HeedfulError(
            f"teacher_layers names the layers {wrong}, but {teacher_name} has {stack.layers}, from 0: name layers from "
            f"0 to {stack.layers - 1}"
        )
    for position, layer in enumerate(layers):
        if _is_local(stack, position) != _is_local(stack, layer):
            raise HeedfulError(
                f"teacher_layers puts layer {layer} in the place of layer {position}, but one has local attention and "
                "the other global: name layers of one kind, or leave teacher_layers out"
            )
    return layers


def _copied_tensors(
    student: ModelBundle, teacher_tensors: dict[str, Tensor], stack_name: str, blocks: Sequence[int], stack: StackConfig
) -> dict[str, Tensor]:
    """Return copies of the teacher's tensors under their names in the student.

    Raises:
        ModelError: If a layer cannot be in the position of another one.
    """
    teacher_names = {name: _teacher_name(name, stack_name, blocks, stack) for name in student.named_tensors()}
    prefixes = tuple(f"{stack_name}.blocks.{block}." for block in blocks)
    names_in_teacher = {name for name in teacher_tensors if name.startswith(prefixes)}
    names_to_copy = {name for name in teacher_names.values() if name.startswith(f"{stack_name}.blocks.")}
    if different := sorted(names_in_teacher ^ names_to_copy):
        raise ModelError(
            f"the layers {' '.join(map(str, blocks))} cannot be in this order: {different[0]} would be missing "
            "or lost, since this teacher's first layer has another form: name it first and only there"
        )
    return {name: teacher_tensors[teacher_name].detach().clone() for name, teacher_name in teacher_names.items()}


def _teacher_name(name: str, stack_name: str, blocks: Sequence[int], stack: StackConfig) -> str:
    """Return the teacher's name for a tensor of the student; `blocks` are the copied blocks of the teacher."""
    lists_of_layers = ["blocks"]
    if isinstance(stack.relation, Shaw | TransformerXl):
        lists_of_layers.append("relations")
    components = name.split(".")
    if components[0] == stack_name and components[1] in lists_of_layers:
        components[2] = str(blocks[int(components[2])])
    return ".".join(components)


def _in_family(family: str, config: BundleConfig) -> BundleConfig:
    """Return the config of a model in another family, without a head, with the dropout of `family`.

    Token types are left out if the family has none and positions are learned: `student_from_layers` adds the vector of
    type 0 to the positions.

    Raises:
        HeedfulError: If the family is unknown, or computes the layers in another way.
    """
    if family not in FAMILIES:
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, list(FAMILIES))}: {", ".join(FAMILIES)}')
    model = config.model
    if _lacks_stacks(family) == (model.encoder is None, model.decoder is None):
        # written as a config.json of the family and read again: equal configs compute the same, except for dropout
        converted = read_config(dict(FAMILIES[family].write(model)) | {"model_type": family}, family).model
        if converted.embedding.types == 0 and isinstance(model.embedding.positions, Learned):
            model = replace(model, embedding=replace(model.embedding, types=0))
        if with_dropout(converted, model) == model:
            return BundleConfig(family=family, model=converted)
    raise HeedfulError(
        f"the teacher's layers are computed in another way than {family} does: leave student.family out, or take a "
        "student of a size, which begins with fresh weights"
    )


def _lacks_stacks(family: str) -> tuple[bool, bool] | None:
    """Return (whether a family lacks an encoder, whether it lacks a decoder), or None if it has no published size."""
    if not FAMILIES[family].sizes:
        return None
    model = first_published_config(family)
    return model.encoder is None, model.decoder is None


# -- students of a named size -------------------------------------------------------------------------------------


def student_of_size(teacher: ModelBundle, settings: SizeStudent, max_length: int | None, seed: int) -> ModelBundle:
    """Make a student with random weights and the teacher's vocabulary, without a head.

    Raises:
        HeedfulError: If the settings name an unknown family, or one without published sizes.
    """
    tokenizer = require_tokenizer(teacher)
    max_length = max_length or min(teacher.max_length or MAX_LENGTH, MAX_LENGTH)
    shape = PretrainSettings(
        model=ModelSettings(size=settings.size, layers=settings.layers, width=settings.width, heads=settings.heads),
        max_seq_length=max_length,
    )
    family = settings.family or _default_family(teacher.config)
    student = create(config_of_size(family, shape, tokenizer), tokenizer.limited(max_length), seed=seed)
    student.source = f"a fresh model of size {settings.size}"
    return student.eval()


def _default_family(config: BundleConfig) -> str:
    """Return the teacher's family if its published sizes have the teacher's stacks, else the default family for MLM."""
    if _lacks_stacks(config.family) == (config.model.encoder is None, config.model.decoder is None):
        return config.family
    return DEFAULT_FAMILIES["mlm"]


# -- the losses ---------------------------------------------------------------------------------------------------


def resolve_losses(settings: LossSettings, student: ModelBundle, teacher: ModelBundle) -> DistillationLosses:
    """Resolve loss settings to the layers and heads of a student and a teacher.

    Raises:
        HeedfulError: If one of them lacks a layer, or their relations cannot be compared.
    """
    states: list[HiddenStateLoss] = []
    relations: tuple[RelationLoss, ...] = ()
    if settings.states is not None or settings.relations is not None:
        stacks = require_single_stack(student), require_single_stack(teacher)
        if settings.states is not None:
            states.append(_state_loss(settings.states, *stacks))
        if settings.relations is not None:
            relations = _relation_losses(settings.relations, *stacks)
    return DistillationLosses(
        kd=settings.kd_weight,
        temperature=settings.temperature,
        ranking=settings.ranking,
        label=settings.label_weight,
        states=tuple(states),
        relations=relations,
    )


def head_untrained(settings: LossSettings, student: ModelBundle, teacher: ModelBundle) -> bool:
    """Tell whether the student's head has random weights and no loss trains it."""
    if settings.kd_weight or settings.label_weight:  # these losses train the head
        return False
    head_has_weights = teacher.head is not None and any(True for _ in teacher.head.parameters())
    return head_has_weights and student.config.head != teacher.config.head


def _state_loss(settings: StatesSettings, student: StackConfig, teacher: StackConfig) -> HiddenStateLoss:
    """Resolve the loss on hidden states to pairs of a student layer and a teacher layer."""
    pairs = settings.pairs or ((student.layers, teacher.layers),)
    if not settings.pairs and settings.layers == "spread":
        pairs = tuple((n, floor(n * teacher.layers / student.layers + 0.5)) for n in range(student.layers + 1))
    for student_layer, teacher_layer in pairs:
        if not (0 <= student_layer <= student.layers and 0 <= teacher_layer <= teacher.layers):
            raise HeedfulError(
                f"states.pairs has ({student_layer}, {teacher_layer}), but the student has {student.layers} layers and "
                f"the teacher {teacher.layers}: give numbers from 0, the input of the first layer, to these"
            )
    return HiddenStateLoss(weight=settings.weight, how=settings.how, pairs=tuple(pairs))


def _relation_losses(
    settings: RelationsSettings, student: StackConfig, teacher: StackConfig
) -> tuple[RelationLoss, ...]:
    """Resolve the loss on relations to one term for each pair of a student layer and a teacher layer.

    The weight is divided by the number of terms.
    """
    heads = settings.heads or teacher.heads
    if settings.layers == "spread" and settings.layer is None and settings.teacher is None:
        pairs = [
            (n - 1, max(0, floor(n * teacher.layers / student.layers + 0.5) - 1)) for n in range(1, student.layers + 1)
        ]
    else:
        student_layer = student.layers - 1 if settings.layer is None else settings.layer
        teacher_layer = teacher.layers - 1 if settings.teacher is None else settings.teacher
        pairs = [(student_layer, teacher_layer)]
    for role, layers, stack in (
        ("student", [layer for layer, _ in pairs], student),
        ("teacher", [layer for _, layer in pairs], teacher),
    ):
        if wrong := [layer for layer in layers if not 0 <= layer < stack.layers]:
            raise HeedfulError(
                f"relations: layer {wrong[0]} of the {role} was named, but it has {stack.layers}, from 0: name a layer "
                f"from 0 to {stack.layers - 1}"
            )
        if stack.heads * stack.head_width % heads:
            raise HeedfulError(
                f"relations: the {role}'s {stack.heads * stack.head_width} numbers of queries and keys cannot be split "
                f"into {heads} heads: set loss.relations.heads to a number that divides both"
            )
        is_plain_attention = stack.relation is None and not stack.causal and stack.window is None
        if "qk" in settings.of and not is_plain_attention:
            raise HeedfulError(
                'relations: "qk" is for attention without relative positions, causal mask and window, but the '
                f"{role} has one of them: use qq, kk and vv"
            )
    return tuple(
        RelationLoss(
            weight=settings.weight / len(pairs),
            of=tuple(settings.of),
            pair=pair,
            heads=heads,
            squares=settings.squares,
        )
        for pair in pairs
    )


def sentence_dimension(loaded: ModelBundle) -> int:
    """Return the dimension of a sentence vector. An embedding head concatenates the vectors of its poolings."""
    head, model = loaded.config.head, loaded.config.model
    return head.width(model) if isinstance(head, SentenceEmbedding) else model.width


def hidden_size_for_lr(settings: StudentSettings, teacher: ModelBundle) -> int:
    """Return the hidden size for the default learning rate: that of a student in a folder, else the teacher's."""
    if isinstance(settings, FolderStudent):
        return config_of(settings.model, revision=settings.revision or None).model.width
    return teacher.config.model.width
