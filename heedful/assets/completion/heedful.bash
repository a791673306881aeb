# Completion of heedful @VERSION@ in bash. Written by: heedful completion bash

_heedful_table() {
    table=
    case $1 in
@TABLES@
    esac
}

_heedful_words() { # settings as PATH=VALUE, and files
    while IFS='|' read -r word values help; do
        [[ $word == [?=]* || $word == --*.* ]] || continue
        word=${word#[?=]} word=${word#--}
        [[ $word == "$cur"* ]] || continue
        rest=${word#"$cur"}
        if [[ $rest == *.* ]]; then
            word=$cur${rest%%.*}.
        else
            word+==
        fi
        [[ " ${COMPREPLY[*]} " == *" $word "* ]] || COMPREPLY+=("$word")
    done <<< "$table"
    (( ${#COMPREPLY[@]} )) || return 0
    while read -r word; do
        [[ -d $word ]] && word+=/
        COMPREPLY+=("$(printf %q "$word")")
    done < <(compgen -f -- "$cur")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[.=/] ]] && compopt -o nospace 2>/dev/null
    return 0
}

_heedful() {
    local cur=${COMP_WORDS[COMP_CWORD]} verb= table word values help rest last= option= wanted= at=0 i
    COMPREPLY=()
    (( COMP_CWORD > 1 )) && verb=${COMP_WORDS[1]}
    _heedful_table "$verb"
    [[ $table ]] || return 0
    for (( i = 2; i < COMP_CWORD; i++ )); do
        word=${COMP_WORDS[i]}
        if [[ $word == = ]]; then # readline separates words at "="
            option=$last
        elif [[ $option ]]; then
            option=
        elif [[ $word == -* ]]; then
            last=$word
            [[ $table == *$'\n'"$word|-"* || $table == *$'\n'"?$word|-"* ]] || option=$word
        else
            last=$word
            (( ++at ))
        fi
    done
    if [[ $cur == = ]]; then
        option=$last cur=
    fi
    if [[ $option ]]; then
        wanted=$option
    elif [[ $cur != -* && $verb ]]; then
        wanted=$(( at + 1 ))
    fi
    if [[ $wanted ]]; then
        while IFS='|' read -r word values help; do
            if [[ ${word#\?} == "$wanted" || $word == "=$wanted" || ${word#\?} == "--$wanted" ]]; then
                [[ $values == \** ]] && return 0 # files
                COMPREPLY=($(compgen -W "${values#-}" -- "$cur"))
                [[ $wanted == [0-9]* ]] || compopt +o default +o bashdefault 2>/dev/null
                return 0
            fi
        done <<< "$table"
        if [[ $cur && $wanted == [0-9]* && $table == *$'\n='* ]]; then
            _heedful_words
        fi
        return 0
    fi
    while IFS='|' read -r word values help; do
        if [[ $word == \?* ]]; then # the end of a setting's path
            [[ $cur == --?* ]] || continue
            word=${word#\?}
        fi
        [[ $word == "$cur"* ]] || continue
        [[ $verb && $word != -* ]] && continue
        rest=${word#"$cur"}
        [[ $rest == *.* ]] && word=$cur${rest%%.*}.
        [[ " ${COMPREPLY[*]} " == *" $word "* ]] || COMPREPLY+=("$word")
    done <<< "$table"
    compopt +o default +o bashdefault 2>/dev/null
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace 2>/dev/null
    return 0
}

complete -o bashdefault -o default -F _heedful heedful
